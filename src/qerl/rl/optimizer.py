"""AdamW over the trainable parameters, and its learning rate as a function of progress alone.

    type          moments                                                          bytes a parameter
    adamw         fp32; one fused kernel for all parameters on a GPU               8
    adamw_8bit    8 bits, a scale for 256 (bitsandbytes, arXiv 2110.02861);        2.03
                  fp32 for tensors of fewer than 4,096 numbers

The rate needs no state: it is computed from the number of the update, so a resumed run cannot restart it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from qerl.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW on fp32 masters; vectors (norm weights) are not decayed.

    ValueError: nothing is trainable, or what `check_optimizer` refuses.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter is trainable: lora.target_modules matched nothing")
    wrong = {p.dtype for p in parameters} - {torch.float32}
    assert not wrong, f"trainable parameters are fp32 masters, found {wrong}"
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = config.beta1, config.beta2
    if config.type == "adamw_8bit":
        return _adamw_8bit()(groups, lr=config.learning_rate, betas=betas)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def check_optimizer(config: OptimizerConfig) -> None:
    """ValueError for an optimizer whose library is not installed: asked before a model is loaded."""
    if config.type == "adamw_8bit":
        _adamw_8bit()


def _adamw_8bit() -> Any:
    try:
        from bitsandbytes import optim
    except ImportError:
        raise ValueError(
            'optimizer.type = "adamw_8bit" needs bitsandbytes: pip install qerl[bitsandbytes], or use "adamw"'
        ) from None
    return optim.AdamW8bit  # pyright: ignore[reportPrivateImportUsage]


def learning_rate(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """The rate of update `update` (0-based) of `num_updates`: a linear rise over `warmup_ratio`, then the decay.

    The first update already has a rate above 0, and the last of a decaying schedule too.
    """
    warmup = math.ceil(config.warmup_ratio * num_updates)
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    progress = (update - warmup) / max(1, num_updates - warmup)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.learning_rate * decay[config.lr_scheduler]

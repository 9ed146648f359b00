"""AdamW over the trainable parameters, and its learning rate as a function of progress alone.

The rate needs no state: it is computed from the number of the update, so a resumed run cannot restart it.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from qerl.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in fp32; vectors (norm weights) are not decayed. ValueError when nothing is trainable."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter is trainable: lora.target_modules matched nothing")
    wrong = {p.dtype for p in parameters} - {torch.float32}
    assert not wrong, f"trainable parameters are fp32 masters, found {wrong}"
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


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

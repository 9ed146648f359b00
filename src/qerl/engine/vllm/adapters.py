"""The trainer's LoRA factors, as vLLM takes them.

    y = base(x) + (x A^T) (scaling B)^T         A [r, K], scaling B [N, r], both rounded to the model's dtype by vLLM

The names are transformers' (`model.layers.0.self_attn.q_proj`); vLLM puts q, k, v and gate, up side by side itself. The
trainer multiplies the finished product by the scaling, vLLM has it in B: the same numbers where it is a power of two.

Called by engine.py, and `names_missing` by worker.py. Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import Float
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from qerl.nn.lora import lora_factors
from qerl.nn.structure import causal_lm

Factors = dict[str, tuple[Float[Tensor, "r k"], Float[Tensor, "n r"]]]
"""By linear: A, and B times the scaling."""


def adapter_factors(model: nn.Module) -> Factors:
    """Those of every linear with an adapter, in the masters' dtype; empty without adapters.

    ValueError for what is trained beside LoRA factors, or is no plain LoRA: vLLM would sample without it.
    """
    factors: Factors = {}
    for name, module in causal_lm(model).named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ValueError(f'rollout.engine = "vllm" takes LoRA factors, and {name} is trained whole: use "auto"')
        lora = lora_factors(module)
        if lora is None and not isinstance(module, BaseTunerLayer):
            continue
        if lora is None:
            raise ValueError(
                f'rollout.engine = "vllm": the adapter of {name} is switched off, merged, or not plain LoRA: use "auto"'
            )
        factors[name] = (lora.a.detach(), lora.b.detach() * lora.scaling)
    return factors


def names_missing(names: Iterable[str], modules: Iterable[str], packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Linears that vLLM has no place for an adapter of.

    modules: those that it has (`...qkv_proj`, `...o_proj`); packed: the linears that each fused one stands for.
    """
    places = {*modules, *(name for parts in packed.values() for name in parts)}
    return sorted(set(names) - places)

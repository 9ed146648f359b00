"""The adapters: PEFT's LoRA on packed and on plain linears, and the factors that the engine copies.

    y = base(x) + scaling * ((x A^T) B^T)       A [r, K], B [N, r]; scaling = alpha / r, or alpha / sqrt(r) with rsLoRA

A and B are fp32 masters, rounded to x's dtype in every forward pass, and so is x A^T. `adapted_product` is that
equation and its gradient in as few passes over memory as the products need, and the engine computes the same one from
what `lora_factors` hands it:

    u  = scaling * (x A^T);    y = base(x) + u B^T          one sum in fp32, rounded once (kernels/w4a16), over a packed
                                                            base up to rank 64, unless q, k, v or gate, up, which the
                                                            engine takes together, have a higher rank among them
    u  = x A^T;  y = base(x);  y += scaling * u B^T         over any other, in place; and under torch.compile

The difference matters. A young adapter's part is smaller than half a step of base(x) in bf16. Added behind a rounding
it is lost, everywhere, and a policy that samples with it is another than the one that is trained.

    du = scaling * dy B;    dB = dy^T u (scaling * dy^T u);    dA = du^T x           dA, dB: fp32
    dx = dy W;       dx += du A                     in place

PEFT owns names, files and switches: `save_pretrained` writes an adapter that plain transformers + PEFT load
over the original base, and `adapters_disabled` gives the reference policy. What differs here: A is drawn from a key
(seed, layer name), the same on any device and in any order; a target or pattern that matches nothing is an error; and
merging into packed codes is refused. With `train_norms` PEFT trains a copy of each RMSNorm and saves it with the
adapter; noise finds that copy (noise.noise_sites).
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import peft
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from peft import PeftModel
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl import philox
from qerl.config import LoraConfig
from qerl.formats.checkpoint import open_tensors
from qerl.kernels.adapter import MAX_RANK
from qerl.kernels.layout import PackedWeight
from qerl.kernels.room import room_behind, room_for
from qerl.nn.linear import PackedLinear, without_view
from qerl.nn.mlp import GatedMLP
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import causal_lm, decoder_layers
from qerl.noise import SITE_NAMES

_WEIGHTS = "adapter_model.safetensors"  # PEFT's name for it
_KEY_DOMAIN = 0x4C6F5241  # "LoRA": initialisation shares no key with noise or sampling


@dataclass(frozen=True)
class LoraFactors:
    """One linear's adapter: scaling * (B A)."""

    a: Float[Tensor, "r k"]
    """fp32, unless PEFT made it otherwise."""
    b: Float[Tensor, "n r"]
    scaling: float


def is_lora(linear: object) -> TypeGuard[PeftLinear]:
    """Whether a layer is ours or PEFT's own, with at most one adapter that is B A and nothing else (no DoRA, bias)."""
    return (
        isinstance(linear, PeftLinear)
        and type(linear) in (LoraLinear, PeftLinear)
        and not (linear.lora_variant or any(linear.lora_bias.values()) or linear.fan_in_fan_out)
        and len(linear.active_adapters) <= 1
    )


def lora_factors(linear: nn.Module) -> LoraFactors | None:
    """The adapter that `linear` applies now, as the masters themselves; None where it has none or it is disabled."""
    if not is_lora(linear) or linear.disable_adapters or linear.merged or not linear.active_adapters:
        return None
    return _factors(linear)


def adapted_product(x: Float[Tensor, "*batch k"], base: nn.Linear, factors: LoraFactors) -> Float[Tensor, "*batch n"]:
    """base(x) + scaling * ((x A^T) B^T), with A and B rounded to x's dtype; gradients to x, A, B and base's bias.

    base: a PackedLinear, or an nn.Linear whose weight is frozen.
    """
    return _AdaptedProduct.apply(x, base, base.bias, factors.a, factors.b, factors.scaling, room_behind(x))


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: nn.Linear, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, room: int
    ) -> Tensor:
        a_rounded, b_rounded = a.to(x.dtype), b.to(x.dtype)
        if isinstance(base, PackedLinear) and _takes_adapter(base, len(a)):
            y, u = base.adapted_product(x, a_rounded, b_rounded, scaling, room)
            y, ctx.outer = without_view(y), 1.0
        else:
            u = F.linear(x.flatten(0, -2), a_rounded)
            y = base.product(x) if isinstance(base, PackedLinear) else F.linear(x, base.weight, bias)
            y.flatten(0, -2).addmm_(u, b_rounded.T, alpha=scaling)
            ctx.outer = scaling
        ctx.save_for_backward(x, u, a, b)
        ctx.base, ctx.scaling = base, scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, u, a, b = ctx.saved_tensors
        base: nn.Linear = ctx.base
        dy, dx, dbias, da, db = grad.flatten(0, -2), None, None, None, None
        du = _times_(dy @ b.to(dy.dtype), ctx.scaling)
        if ctx.needs_input_grad[0]:
            dx = base.input_grad(grad) if isinstance(base, PackedLinear) else grad @ base.weight
            dx.flatten(0, -2).addmm_(du, a.to(dy.dtype))
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0)
        if ctx.needs_input_grad[3]:
            da = _product_in_fp32(du.T, x.flatten(0, -2)).to(a.dtype)
        if ctx.needs_input_grad[4]:
            db = _times_(_product_in_fp32(dy.T, u), ctx.outer).to(b.dtype)
        return dx, None, dbias, da, db, None, None


def _takes_adapter(base: PackedLinear, rank: int) -> bool:
    """Whether the engine's product has the adapter in its sum; a compiler's operator has none with a gradient."""
    return isinstance(base.packed, PackedWeight) and rank <= MAX_RANK and not torch.compiler.is_compiling()


def _times_(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x.mul_(factor)  # small models wait for the host to launch, and alpha / r is often 1


def _product_in_fp32(left: Float[Tensor, "m k"], right: Float[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


class LoraLinear(PeftLinear):
    """PEFT's LoRA layer with our forward pass, over a PackedLinear or an nn.Linear."""

    def forward(self, x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """The base's output plus the active adapter's."""
        base, factors = self.get_base_layer(), lora_factors(self)
        if factors is None:
            return self.base_layer(x)
        assert isinstance(base, PackedLinear) or (type(base) is nn.Linear and not base.weight.requires_grad)
        return adapted_product(x, base, factors)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapter to the base weight. ValueError for a packed one: 4 bits would round most of it away."""
        if isinstance(self.get_base_layer(), PackedLinear):
            raise ValueError("an adapter cannot be merged into packed weights: merge it into the bf16 base")
        super().merge(safe_merge, adapter_names)


def attach_lora(model: nn.Module, lora: LoraConfig, *, seed: int) -> PeftModel:
    """Put an adapter on every linear of the decoder layers that `lora.target_modules` names: B = 0, A from `seed`.

    Only the factors (and, with `train_norms`, copies of the RMSNorms) require gradients. ValueError: a target or
    pattern that matches nothing, or a target outside the decoder layers.
    """
    targets = _targets(model, lora.target_modules)
    lora.check_patterns(targets)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=_plain(lora.alpha),
        target_modules=list(lora.target_modules),
        use_rslora=lora.use_rslora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern={pattern: _plain(alpha) for pattern, alpha in lora.alpha_pattern.items()},
        modules_to_save=_norm_names(model) if lora.train_norms else None,
    )
    adapted = _attach(model, config)
    for name, module in causal_lm(adapted).named_modules():
        if isinstance(module, LoraLinear):
            _initialize(module, philox.fold(_KEY_DOMAIN, seed, zlib.crc32(name.encode())))
    return adapted


def attach_saved_adapter(model: nn.Module, folder: Path) -> PeftModel:
    """Put a saved LoRA adapter, this package's or another's, on the model, frozen.

    ValueError: no adapter there, one of another kind than LoRA (DoRA, biases), or for other layers than linears of the
    decoder layers and RMSNorms.
    """
    adapted = _attach(model, _saved_config(folder))
    load_adapter_weights(adapted, folder)
    return adapted


@dataclass(frozen=True)
class SavedAdapter:
    """A saved adapter's tensors in fp32, on the host."""

    factors: dict[str, LoraFactors]
    """By the name of the model's linear."""
    norms: dict[str, Float32[Tensor, " h"]]
    """Trained RMSNorm weights, by the name of the model's parameter."""


def read_adapter(model: nn.Module, folder: Path) -> SavedAdapter:
    """A saved adapter without a model to put it on: `model` may be on the meta device, and stays as it is.

    ValueError as `attach_saved_adapter` has it, and for NaN or infinity.
    """
    adapted = _attach(copy.deepcopy(causal_lm(model)), _saved_config(folder), on_meta=True)
    saved, _ = _matched_weights(adapted, folder)
    for name, tensor in saved.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{folder}: {name} contains NaN or infinity")
    adapter = SavedAdapter({}, {})
    for name, module in causal_lm(adapted).named_modules():
        stored = f"base_model.model.{name}"  # PEFT's name
        if isinstance(module, LoraLinear):
            a, b = (saved[f"{stored}.lora_{part}.weight"].float() for part in "AB")
            adapter.factors[name] = LoraFactors(a, b, module.scaling[module.active_adapters[0]])
        elif isinstance(module, AuxiliaryTrainingWrapper):
            adapter.norms[f"{name}.weight"] = saved[f"{stored}.weight"].float()
    return adapter


@contextmanager
def adapters_disabled(model: PeftModel) -> Generator[None]:
    """The frozen base alone, original norms included: the reference policy."""
    with model.disable_adapter():
        yield


@torch.no_grad()
def load_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Copy a saved adapter into the attached one, in place; ValueError unless all names and shapes agree."""
    saved, present = _matched_weights(model, folder)
    for name, tensor in present.items():
        tensor.copy_(saved[name])


def check_start(folder: Path, lora: LoraConfig) -> None:
    """ValueError, with the settings that would do, where a saved adapter is not of the kind that [lora] makes."""
    saved = _saved_config(folder)
    _refuse_beyond(saved, f"lora.start_from: {folder}")
    theirs = {
        "r": saved.r,
        "alpha": saved.lora_alpha,
        "use_rslora": saved.use_rslora,
        "rank_pattern": saved.rank_pattern,
        "alpha_pattern": saved.alpha_pattern,
        "train_norms": bool(saved.modules_to_save),
    }
    if saved.target_modules is not None and not isinstance(saved.target_modules, str):
        theirs["target_modules"] = sorted(saved.target_modules)
    ours = {name: getattr(lora, name) for name in theirs}
    ours["target_modules"] = sorted(lora.target_modules)
    other = {name: value for name, value in theirs.items() if value != ours[name]}
    if other:
        fix = " ".join(f"lora.{name}={json.dumps(value)}" for name, value in other.items())
        raise ValueError(f"lora.start_from: {folder} was made with other settings: set {fix}")


def check_saved_adapter(model: nn.Module, folder: Path) -> None:
    """ValueError as `attach_saved_adapter` has it. `model` may be on the meta device, and stays as it is."""
    _match(_attach(copy.deepcopy(causal_lm(model)), _saved_config(folder), on_meta=True), folder)


def _saved_config(folder: Path) -> peft.LoraConfig:
    if not (folder / "adapter_config.json").is_file():
        inside = sorted(folder.glob("checkpoints/*/adapter")) or sorted(folder.glob("adapter"))  # a run's own folder
        there = f"; there is one in {inside[-1]}" if inside else ""
        raise ValueError(f"no adapter in {folder}: adapter_config.json is missing{there}")
    config = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, peft.LoraConfig):
        raise ValueError(f"{folder} holds a {config.peft_type} adapter: only LoRA is supported")
    config.inference_mode = True
    return config


def _matched_weights(model: PeftModel, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a saved adapter and of the attached one, by name; ValueError unless names and shapes agree."""
    present = _match(model, folder)
    return load_file(folder / _WEIGHTS), present


def _match(model: PeftModel, folder: Path) -> dict[str, Tensor]:
    """The attached adapter's tensors, by name; ValueError unless a saved one has the same names and shapes."""
    path = folder / _WEIGHTS
    if not path.exists():
        raise ValueError(f"no adapter in {folder}: {path.name} is missing")
    present = peft.get_peft_model_state_dict(model)
    with open_tensors(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in sorted(shapes.keys() | present.keys()):
        here, there = tuple(present[name].shape) if name in present else "nothing", shapes.get(name, "nothing")
        if here != there:
            raise ValueError(
                f"{path} does not fit: {name} is {there} in the file and {here} in the model; is it of another model, "
                "or of other settings in [lora]?"
            )
    return present


def _attach(model: nn.Module, config: peft.LoraConfig, *, on_meta: bool = False) -> PeftModel:
    """Let PEFT wrap the layers (factors on the meta device, if asked to).

    ValueError for what the forward pass here would leave out.
    """
    _refuse_beyond(config, "the adapter")
    config._register_custom_module({nn.Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]):  # PEFT initialises from the global generator; what it draws is replaced
        adapted = peft.get_peft_model(causal_lm(model), config, low_cpu_mem_usage=on_meta)
    inside = {id(module) for layer in decoder_layers(adapted) for module in layer.modules()}
    for name, module in causal_lm(adapted).named_modules():
        if isinstance(module, BaseTunerLayer) and (not isinstance(module, LoraLinear) or id(module) not in inside):
            raise ValueError(f"an adapter on {name} is not supported: only linears of decoder layers can have one")
        if isinstance(module, LoraLinear) and module.lora_variant:
            raise ValueError(f"the adapter on {name} is more than B A ({module.lora_variant}): not supported")
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module.original_module, RMSNorm):
            raise ValueError(f"a trained {name} is not supported: only RMSNorms can be trained beside adapters")
    for layer in decoder_layers(adapted):
        _make_room(layer)
    return adapted


def _refuse_beyond(config: peft.LoraConfig, what: str) -> None:
    beyond = [name for name in ("use_dora", "lora_bias", "target_parameters") if getattr(config, name, None)]
    if beyond:
        raise ValueError(f"{what} is more than B A of linears ({', '.join(beyond)}): not supported")


def _make_room(layer: nn.Module) -> None:
    """Norms and SwiGLU leave room for u behind what packed products with adapters read (kernels/room.py)."""
    adapted = [(m.get_base_layer(), len(_factors(m).a)) for m in layer.modules() if isinstance(m, LoraLinear)]
    ranks = [r for base, r in adapted if isinstance(base, PackedLinear) and _takes_adapter(base, r)]
    norms = [module for name in SITE_NAMES for module in getattr(layer, name, nn.Module()).modules()]
    for module in [*norms, *layer.children()]:
        if isinstance(module, RMSNorm | GatedMLP):
            module.room = room_for(max(ranks, default=0))


def _factors(layer: PeftLinear) -> LoraFactors:
    (name,) = layer.active_adapters
    a, b = (part.get_parameter(f"{name}.weight") for part in (layer.lora_A, layer.lora_B))
    return LoraFactors(a, b, layer.scaling[name])


def _initialize(layer: LoraLinear, key: int) -> None:
    """B = 0 and A uniform in (-1, 1) / sqrt(K), as torch's and PEFT's default has it."""
    factors = _factors(layer)
    rank, width = factors.a.shape
    rows = torch.arange(rank, device=factors.a.device)
    with torch.no_grad():
        factors.a.copy_(philox.uniform(key, rows, width).mul_(2).sub_(1).mul_(1 / math.sqrt(width)))
        factors.b.zero_()


def _targets(model: nn.Module, wanted: Iterable[str]) -> list[str]:
    """Full names of the layers to adapt, by PEFT's rule: the whole name, or its end."""
    modules = dict(causal_lm(model).named_modules())
    targets: list[str] = []
    for target in wanted:
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not found:
            known = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)}
            near = difflib.get_close_matches(target, known, n=1) or sorted(known)
            raise ValueError(f"lora.target_modules: no layer is called {target!r}; did you mean {' or '.join(near)}?")
        targets += found
    return targets


def _norm_names(model: nn.Module) -> list[str]:
    """Name endings for PEFT's modules_to_save, which together match every RMSNorm and nothing else."""
    modules = dict(causal_lm(model).named_modules())
    norms = {name for name, module in modules.items() if isinstance(module, RMSNorm)}
    endings = sorted({name.rsplit(".", 1)[-1] for name in norms})
    others = {name for name in modules if name.endswith(tuple(endings))} - norms
    if not norms or others:
        raise ValueError(f"lora.train_norms: norms of this model are not w * x / rms(x): {sorted(others) or 'all'}")
    return endings


def _plain(number: float) -> Any:
    """32.0 as 32: other readers of adapter_config.json expect an integer where it is one."""
    return int(number) if number == int(number) else number

"""What a model does with a user's text, layer by layer, and what that says about quantising its weights.

    text -> windows -> hidden states of all tokens, on the host
    each decoder layer:   load -> run all tokens, watch what its linears are given -> factors -> check -> forget

    AWQ         factors s for the four inputs of a layer (SITES), by formats/awq.py, folded into what they read from
    importance  the mean square of each linear's inputs: weighs the columns in the choice of block scales

The device holds one layer's weights and one batch of tokens. Layers see what the unquantised model gives them. Where
a layer is folded, it is run again in fp32 and must compute what it did: so a decoder that puts something else between
norm and linears is refused, and not broken. Called by `qerl quantize --calibrate`; formats/writing.py folds the result
in while it writes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qerl.config import ModelConfig
from qerl.formats.awq import Choice, Inputs, choose_factors, exact_in_norm, untied
from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import NVFP4, Swept
from qerl.formats.folding import Calibration, Fold
from qerl.formats.writing import packed_groups, quantize_checkpoint
from qerl.inspection.text import windows_for
from qerl.nn.attention import packed_forward
from qerl.nn.load import Base, open_base, resolve_device
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.stream import prepared
from qerl.nn.structure import decoder_layers, head_dim

logger = logging.getLogger(__name__)

_DEFAULT = NVFP4()

SITES = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
"""What an input comes from, and the linears that read it; those that a layer has, in this order."""

BATCH_TOKENS = 8192  # that pass through a layer at a time: some GB of activations in the largest models
SAMPLE_TOKENS = 1024  # of all, that the loss of a choice of factors is measured on
_FEW_TOKENS = 4096  # below this a calibration says more about the text than about the model
_PROBE_TOKENS = 64  # that a folded layer is checked on
_TOLERANCE = 1e-3  # of what a layer adds; a factor in the wrong place changes it by tens of percent

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Site:
    """The factors of one input, and what they do to the error of the outputs."""

    name: str
    """What it comes from, as the model names it."""
    alpha: float
    loss: float
    """Relative squared error of the outputs, on the sampled tokens."""
    loss_before: float
    """Without factors."""


@dataclass(frozen=True)
class Calibrated:
    """What was found, and on how much text."""

    calibration: Calibration
    sites: list[Site]
    """Empty where only importance was asked for."""
    num_tokens: int


def calibrated_quantize(
    source: Path | str,
    target: Path | str,
    text: Path,
    *,
    format: Swept = _DEFAULT,
    awq: bool = True,
    weighted: bool = True,
    keep: Sequence[str] = (),
    length: int = 2048,
    max_windows: int = 256,
    device: str = "auto",
    calibration_progress: Progress | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`calibrate`, then formats/writing.py's quantize_checkpoint with the result; its report, and what AWQ has done."""
    done: list[Calibrated] = []

    def run() -> Calibration:
        found = calibrate(
            source,
            text,
            format=format,
            awq=awq,
            weighted=weighted,
            keep=keep,
            length=length,
            max_windows=max_windows,
            device=device,
            progress=calibration_progress,
        )
        done.append(found)
        return found.calibration

    if not text.is_file():
        raise ValueError(f"--calibrate {text}: there is no such file")
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    settings = {"text_sha256": digest, "length": length, "windows": max_windows, "awq": awq, "weighted": weighted}
    report = quantize_checkpoint(
        source,
        target,
        format=format,
        keep=keep,
        calibrate=run,
        made_with={"calibration": settings},
        device=resolve_device(device),
        progress=progress,
    )
    if done:  # and not read back after a cut
        report["calibration_tokens"] = done[0].num_tokens
        sites = done[0].sites
        if sites:
            report["awq_inputs"] = f"{sum(site.alpha > 0 for site in sites)} of {len(sites)} scaled"
            before, after = (sum(getattr(s, key) for s in sites) / len(sites) for key in ("loss_before", "loss"))
            report["awq_output_error"] = f"{before:.3%} -> {after:.3%}"
    return report


@torch.no_grad()
def calibrate(
    source: Path | str,
    text: Path,
    *,
    format: Swept = _DEFAULT,
    awq: bool = True,
    weighted: bool = True,
    keep: Sequence[str] = (),
    length: int = 2048,
    max_windows: int = 256,
    device: str = "auto",
    progress: Progress | None = None,
) -> Calibrated:
    """Factors (`awq`) and importance (`weighted`) for the linears of a bf16 folder, from a text file's first windows.

    `format`, with its rule of scales, is the one that will be written. ValueError: what `open_base` and `windows_for`
    refuse, an architecture that AWQ cannot fold, NaN in an activation.
    """
    base = open_base(ModelConfig(path=str(source), format="bf16", device=device))
    windows = windows_for(base, text, length, max_windows)
    packed = packed_groups(Checkpoint(base.folder), keep, format)
    weights, layers = prepared(base), decoder_layers(base.model)
    stored = base.source.modules
    stack = next(name for name, module in base.model.named_modules() if module is layers)
    found = Calibrated(Calibration({}, {}), [], sum(map(len, windows)))
    if found.num_tokens < _FEW_TOKENS:
        logger.warning("%s gives %d tokens to calibrate on, which are few: take thousands", text, found.num_tokens)
    relay = _Relay(base, windows)
    for index, layer in enumerate(layers):
        weights[index].load()
        groups = [group.names for group in weights[index].groups if stored[group.names[0]] in packed]
        inputs = relay.through(index, groups)
        prefix = f"{stack}.{index}."
        folds: dict[str, Fold] = {}
        if awq:
            choice_of = _Chooser(base, prefix, inputs, format, weighted)
            folds = choice_of.folds(found.sites)
            relay.check(index, layer, {name.removeprefix(prefix): fold for name, fold in folds.items()})
        _enter(found.calibration, folds, inputs if weighted else {}, base)
        weights[index].unload()
        if progress is not None:
            progress(index + 1, len(layers))
    return found


def _enter(calibration: Calibration, folds: Mapping[str, Fold], inputs: Mapping[str, Inputs], base: Base) -> None:
    """Add a layer's findings under the names of the stored modules, on the host."""
    stored = base.source.modules
    assert isinstance(calibration.folds, dict) and isinstance(calibration.importance, dict)
    for name, fold in folds.items():
        calibration.folds[stored[name]] = fold.to("cpu")
    for name, seen in inputs.items():
        columns = folds[name].inputs if name in folds else None
        square = seen.square if columns is None else seen.square / columns.square()
        calibration.importance[stored[name]] = square.cpu()


# --------------------------------------------------------------------------------------------------- factors of a layer


class _Chooser:
    """Chooses the factors of one layer's inputs."""

    def __init__(self, base: Base, prefix: str, inputs: Mapping[str, Inputs], format: Swept, weighted: bool) -> None:
        self.base, self.prefix, self.inputs, self.format, self.weighted = base, prefix, inputs, format, weighted

    def folds(self, report: list[Site]) -> dict[str, Fold]:
        """Folds by module. A site is left alone unless all of its linears are packed; ValueError if there is none."""
        folds: dict[str, Fold] = {}
        sites = 0
        for source, readers in SITES:
            producer = self._module(source)
            present = [self.prefix + name for name in readers if self._module(name) is not None]
            if producer is None or not present:
                continue
            sites += 1
            from_norm = isinstance(producer, RMSNorm)
            involved = present if from_norm else [*present, self.prefix + source]
            if not (from_norm or isinstance(producer, nn.Linear)) or not self.inputs.keys() >= set(involved):
                continue
            choice, heads, tie = self._choose(present, producer)
            report.append(Site(self.prefix + source, choice.alpha, choice.loss, choice.loss_before))
            if choice.alpha == 0:
                continue
            name = self.prefix + source
            factors = choice.factors
            if from_norm:  # exact in the dtype of the folder: the module holds its weight in fp32
                stored = self.base.source.tensor(f"{name}.weight").to(factors.device)
                factors = exact_in_norm(stored, factors)
            folds[name] = folds.get(name, Fold())._replace(outputs=factors)
            for reader in present:
                folds[reader] = folds.get(reader, Fold())._replace(inputs=untied(factors, tie, heads))
        if not sites:
            raise ValueError(
                f"AWQ: {self.prefix[:-1]} of {type(self.base.model).__name__} has none of "
                f"{', '.join(source for source, _ in SITES)} in front of its linears: use --no-awq"
            )
        return folds

    def _module(self, name: str) -> Any:
        return dict(self.base.model.get_submodule(self.prefix[:-1]).named_modules()).get(name)

    def _choose(self, readers: Sequence[str], producer: nn.Module) -> tuple[Choice, int, int]:
        """The factors of one input, and how its heads share them."""
        width = self.inputs[readers[0]].magnitude.numel()
        own = width if isinstance(producer, RMSNorm) else producer.get_parameter("weight").shape[0]
        tie = width // own
        heads = width // head_dim(self.base.model.config) if tie > 1 else 1
        choice = choose_factors(
            [self.base.model.get_parameter(f"{name}.weight") for name in readers],
            self.inputs[readers[0]],
            self.format,
            weighted=self.weighted,
            tie=tie,
            heads=heads,
            names=[f"{name}.weight" for name in readers],
        )
        return choice, heads, tie


# ------------------------------------------------------------------------------------------------- its activations


class _Batch:
    """Tokens that pass through the layers together: their hidden states, and what else layers are called with."""

    def __init__(self, hidden: Float[Tensor, "1 t h"], calls: list[dict[str, Any]]) -> None:
        self.hidden, self.calls = hidden, calls


class _Relay:
    """Takes all tokens through one layer after the other; between layers their hidden states are on the host."""

    def __init__(self, base: Base, windows: Sequence[Sequence[int]]) -> None:
        self.base = base
        self.layers = decoder_layers(base.model)
        per_batch = max(1, BATCH_TOKENS // len(windows[0]))
        pieces = [windows[i : i + per_batch] for i in range(0, len(windows), per_batch)]
        self.probe = self._embed([windows[0][:_PROBE_TOKENS]])
        self.probe.hidden = self.probe.hidden.to(base.device, torch.float32)
        self.probe.calls = [_as_float(call) for call in self.probe.calls]
        self.batches: list[_Batch] = []
        for piece in pieces:
            batch = self._embed(piece)
            if self.batches and self.batches[-1].hidden.shape == batch.hidden.shape:
                batch.calls = self.batches[-1].calls  # windows have one length, so positions are the same
            self.batches.append(batch)

    def through(self, index: int, groups: Sequence[tuple[str, ...]]) -> dict[str, Inputs]:
        """Run layer `index` on all tokens; what the linears of `groups` were given. ValueError: it is not finite."""
        total = sum(batch.hidden.shape[1] for batch in self.batches)
        stride = max(1, total // SAMPLE_TOKENS)
        watchers = {names: _Watcher(self.base.model.get_submodule(names[0]), stride) for names in groups}
        for batch in self.batches:
            hidden = _output(self.layers[index](batch.hidden.to(self.base.device), **batch.calls[index]))
            batch.hidden = hidden.cpu()
        found: dict[str, Inputs] = {}
        for names, watcher in watchers.items():
            seen = watcher.finish(total)
            if not seen.square.isfinite().all():
                raise ValueError(f"{self.base.folder}: what {names[0]} is given on this text is not finite")
            found |= dict.fromkeys(names, seen)
        return found

    def check(self, index: int, layer: nn.Module, folds: Mapping[str, Fold]) -> None:
        """Go on with the probe, in fp32. ValueError unless the folded layer adds to it what the layer does."""
        layer.float()
        before = self.probe.hidden
        after = _output(layer(before, **self.probe.calls[index]))
        for name, fold in folds.items():
            module: Any = layer.get_submodule(name)
            module.weight.copy_(fold.weight(module.weight))
            if getattr(module, "bias", None) is not None:
                module.bias.copy_(fold.bias(module.bias))
        folded = _output(layer(before, **self.probe.calls[index]))
        self.probe.hidden = after
        off, added = (folded - after).norm().item(), (after - before).norm().item()
        if not off <= _TOLERANCE * added:
            raise ValueError(
                f"AWQ: with its factors folded, layer {index} of {type(self.base.model).__name__} is off by "
                f"{off / added:.1%} of what it adds, so more than its linears read from its norms: use --no-awq"
            )

    def _embed(self, windows: Sequence[Sequence[int]]) -> _Batch:
        """The hidden states in front of the first layer, and every layer's keyword arguments."""
        ids = torch.tensor([token for window in windows for token in window], device=self.base.device)
        ends = torch.tensor([0, *map(len, windows)], device=self.base.device).cumsum(0)
        seen: list[tuple[Tensor, dict[str, Any]]] = []
        with _identity(self.layers, lambda hidden, call: seen.append((hidden, call))):
            packed_forward(self.base.model, ids, ends)
        return _Batch(seen[0][0].cpu(), [call for _, call in seen])


@contextmanager
def _identity(layers: nn.ModuleList, record: Callable[[Tensor, dict[str, Any]], None]) -> Generator[None]:
    """Let layers hand their input on, and `record` what they are called with."""

    def forward(hidden_states: Tensor, **call: Any) -> Tensor:
        record(hidden_states, call)
        return hidden_states

    try:
        for layer in layers:
            layer.forward = forward
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


class _Watcher:
    """Sums up what a linear is given, and keeps every `stride`-th token of it."""

    def __init__(self, linear: nn.Module, stride: int) -> None:
        weight = linear.get_parameter("weight")
        width, device = weight.shape[1], weight.device
        self.stride, self.skip = stride, 0
        self.magnitude, self.square = torch.zeros(width, device=device), torch.zeros(width, device=device)
        self.kept: list[Tensor] = []
        self.hook = linear.register_forward_pre_hook(self._see)

    def _see(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, -2)
        values = x.float()
        self.magnitude += values.abs().sum(0)
        self.square += values.square().sum(0)
        self.kept.append(x[self.skip :: self.stride].clone())
        self.skip = (self.skip - len(x)) % self.stride

    def finish(self, num_tokens: int) -> Inputs:
        """The means."""
        self.hook.remove()
        return Inputs(torch.cat(self.kept), self.magnitude / num_tokens, self.square / num_tokens)


def _output(output: Any) -> Float[Tensor, "1 t h"]:
    return output[0] if isinstance(output, tuple) else output


def _as_float(value: Any) -> Any:
    """Floating-point tensors in a layer's arguments as fp32."""
    if isinstance(value, dict):
        return {key: _as_float(item) for key, item in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_as_float(item) for item in value)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

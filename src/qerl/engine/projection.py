"""One product for all linears that read the same input (q, k, v; gate, up), with their adapters.

    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T         i = q, k, v

The base weight is the trainer's own tensor, never a copy. Linears that are neighbours in one PackedWeight, or whose
dense weights are neighbouring rows of one tensor, are one product; others are one each. Adapters are copies, rounded
once to the activations' dtype; while ranks stay, `sync` writes new values into the same memory. Coded weights (NF4,
INT4) are dequantised side by side into one scratch matrix, and are one product so (kernels/coded).

    base                                      adapter
    packed, one product, no rank above 64     within the product (kernels/w4a16): the finished sum is rounded once
    anything else                             beside it, in the trainer's order and rounding (nn/lora.py): all x A_i^T
                                              as one product, all B_i and the addition in one pass (kernels/lora)
    dense, with room behind its rows          the same, but the A_i are there (nn/load.py: spare_rows), so that one
                                              product gives y and all x A_i^T

Batch-invariant ones take the tokens in blocks of always the same size (blocks.py).

Called by model.py. Leaves out all adapters but LoRA.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor, nn

from qerl.engine.blocks import in_blocks
from qerl.kernels.adapter import MAX_RANK, Factors, PackedAdapter, pack_adapter
from qerl.kernels.announcement import Announcement
from qerl.kernels.coded import CodedWeight, coded_product
from qerl.kernels.layout import PackedWeight
from qerl.kernels.lora import Expansion, add_expanded_
from qerl.kernels.w4a16 import awaited, w4a16
from qerl.nn.linear import PackedLinear
from qerl.nn.lora import LoraFactors, lora_factors

Weight = PackedWeight | list[CodedWeight] | Tensor


class Projection:
    """x [.., K] -> y_0 [.., N_0], y_1 [.., N_1], ...: one of a decoder layer's four products."""

    def __init__(self, linears: Sequence[nn.Module], dtype: torch.dtype, *, batch_invariant: bool = False) -> None:
        """linears: as they stand in the model, with or without PEFT's wrapper; dtype: of x."""
        self._linears = list(linears)
        self._dtype, self._batch_invariant = dtype, batch_invariant
        self._bases = [base_linear(linear) for linear in linears]
        self._sizes = [base.out_features for base in self._bases]
        self._products = _fuse(self._bases)
        self._packed = _packed_whole(self._products)
        self._room = _with_spare_rows(self._bases)
        self._ranks: list[int] = []
        self._scalings: list[float] = []
        self._within: PackedAdapter | None = None
        self._beside: _Beside | None = None

    def __call__(
        self, x: Float[Tensor, "*batch k"], gain: float = 1.0, announcement: Announcement | None = None
    ) -> Sequence[Float[Tensor, "*batch n"]]:
        """One output a linear; `gain` multiplies the adapters' part (the probe asks for 0 and for large ones).

        announcement: of x, one that this asked for.
        """
        if self._batch_invariant:
            return in_blocks(lambda block: self._outputs(block, gain), x)
        return self._outputs(x, gain, announcement)

    def announcement(self, tokens: int) -> Announcement | None:
        """How whoever makes x of so many tokens can tell that it is there; None: the product waits for its kernel."""
        if self._packed is None or self._beside is not None or self._batch_invariant:
            return None
        return awaited(self._packed.device, self._dtype, tokens)

    def _outputs(
        self, x: Float[Tensor, "*batch k"], gain: float, announcement: Announcement | None = None
    ) -> Sequence[Float[Tensor, "*batch n"]]:
        adapter = self._within
        if adapter is not None and gain != 1:
            adapter = adapter._replace(scaling=adapter.scaling * gain)
        beside = self._beside
        if beside is None or gain == 0:
            whole = self._whole(x, adapter, announcement)
        elif beside.behind is not None:
            both = F.linear(x, beside.behind, beside.bias)
            whole, inner = both.tensor_split([sum(self._sizes)], dim=-1)
            beside.add_(whole, inner, gain)
        else:
            with beside.inner(x) as inner:
                whole = self._whole(x, None)
            beside.add_(whole, inner, gain)
        return whole.split(self._sizes, dim=-1)

    def _whole(
        self, x: Float[Tensor, "*batch k"], adapter: PackedAdapter | None, announcement: Announcement | None = None
    ) -> Float[Tensor, "*batch n"]:
        products = [_product(x, weight, bias, adapter, announcement) for weight, bias in self._products]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    @property
    def weights(self) -> list[Weight]:
        """The trainer's tensors that the products read."""
        return [weight for weight, _ in self._products]

    @property
    def ranks(self) -> list[int]:
        """Of the adapters, a linear each; 0: none. While they stay, `sync` writes to where it did before."""
        return self._ranks

    def _copies(self, factors: Sequence[LoraFactors | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """(to, from) of what makes these the adapters, which get new memory where their ranks are new."""
        entries: list[Factors | None] = [None if f is None else (f.a, f.b, f.scaling) for f in factors]
        ranks = [0 if f is None else f.a.shape[0] for f in factors]
        if ranks != self._ranks:
            self._ranks, self._scalings, self._within, self._beside = [], [], None, None
            if self._packed is not None and 0 < max(ranks) <= MAX_RANK:
                self._within = pack_adapter(self._packed, entries, self._dtype)
            elif any(ranks):
                self._beside = _Beside(self._bases, ranks, self._dtype, self._room)
                if self._beside.bias is not None:
                    self._products[0] = self._products[0][0], self._beside.bias[: sum(self._sizes)]
            self._ranks = ranks  # only now: where memory has run out, the next sync asks for it again
        scalings = [0.0 if f is None else f.scaling for f in factors]
        holder = self._within or self._beside
        if holder is not None and scalings != self._scalings:
            holder.scaling.copy_(torch.tensor(scalings))
            self._scalings = scalings
        if self._within is not None:
            assert self._packed is not None
            yield from self._within.copies(self._packed, entries)
        if self._beside is not None:
            yield from self._beside.copies(entries)
        yield from self._trained_biases()

    def _trained_biases(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same of biases that are trained with the adapters (PEFT's `bias`), where the product has copies."""
        bias = self._products[0][1]
        if len(self._products) == 1 and bias is not None:
            for part, base in zip(bias.split(self._sizes), self._bases, strict=True):
                if base.bias.requires_grad:
                    yield part, base.bias


@torch.no_grad()
def sync(projections: Sequence[Projection]) -> Float32[Tensor, " adapters"]:
    """Copy the adapters that the trainer's linears apply now, in place while ranks stay; each one's largest |B|.

    Of a model's some hundred small tensors each would take longer to launch than to copy: they are copied together.
    """
    factors = [[lora_factors(linear) for linear in projection._linears] for projection in projections]
    pairs = [pair for p, of_p in zip(projections, factors, strict=True) for pair in p._copies(of_p)]
    # What lies alike in memory is one launch for dozens of tensors; the rest, B in slices of ranks, is one each. Lists
    # of several dtypes would be slow, or, in some versions of torch, wrong.
    groups: defaultdict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for to, new in pairs:
        groups[to.stride() == new.stride(), to.dtype, new.dtype].append((to, new))
    for group in groups.values():
        to, new = zip(*group, strict=True)
        torch._foreach_copy_(to, new)  # pyright: ignore[reportPrivateImportUsage]
    bs = [f.b for of_p in factors for f in of_p if f is not None]
    if not bs:
        return torch.zeros(0)
    return torch.stack(torch._foreach_norm(bs, math.inf)).float()  # pyright: ignore[reportPrivateImportUsage]


class _Beside:
    """Adapters that no product takes in; a rank of 0 is none."""

    behind: Tensor | None
    """The weight with the A_i behind it, where there is room."""
    bias: Tensor | None
    """Of both, with zeros for the latter; its first rows are the product's from then on."""

    def __init__(
        self, bases: Sequence[nn.Linear], ranks: Sequence[int], dtype: torch.dtype, room: Tensor | None
    ) -> None:
        """room: the bases' weights as one, with free rows behind."""
        device = bases[0].weight.device
        rows, added = sum(base.out_features for base in bases), sum(ranks)
        self.behind = self.bias = None
        if room is not None and room.dtype == dtype and rows + added <= len(room):
            self.behind = room[: rows + added]
            self._a = self.behind[rows:]
            if bases[0].bias is not None:
                self.bias = F.pad(torch.cat([base.bias.detach() for base in bases]), (0, added))
        else:
            self._a = torch.empty(added, bases[0].in_features, dtype=dtype, device=device)
        self._expansion = Expansion.empty([base.out_features for base in bases], ranks, dtype, device)

    @property
    def scaling(self) -> Float32[Tensor, " parts"]:
        """Of the parts."""
        return self._expansion.scaling

    def copies(self, factors: Sequence[Factors | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """(to, from) of what makes these the adapters; ranks are as they were."""
        sizes, ranks = self._expansion.sizes, self._expansion.ranks
        for a, b, f in zip(self._a.split(ranks), self._expansion.b.split(sizes), factors, strict=True):
            if f is not None:
                yield a, f[0]
                yield b[:, : len(a)], f[1]

    @contextmanager
    def inner(self, x: Float[Tensor, "*batch k"]) -> Generator[Float[Tensor, "*batch ranks"]]:
        """x A^T, there when the block ends: a GPU runs it on a stream of its own, beside what the block launches."""
        if not x.is_cuda:
            yield F.linear(x, self._a)
            return
        main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                inner = F.linear(x, self._a)
            yield inner
        finally:  # after an error, too: a graph's capture cannot end while a stream that it has forked goes on
            main.wait_stream(side)

    def add_(self, y: Float[Tensor, "*batch n"], inner: Float[Tensor, "*batch ranks"], gain: float) -> None:
        """Add the adapters' part to the whole product, in place."""
        add_expanded_(y.flatten(0, -2), inner.flatten(0, -2), self._expansion, gain)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where the adapters' first half runs. Its tensors are used up before the main stream goes on, so both streams'
    memory is safe without `record_stream`: what one frees is given out again on the same stream, after it waited."""
    return torch.cuda.Stream(device)


def base_linear(linear: nn.Module) -> nn.Linear:
    """The linear under PEFT's wrapper, or the linear itself."""
    unwrap = getattr(linear, "get_base_layer", None)
    base = unwrap() if unwrap is not None else linear
    assert isinstance(base, nn.Linear)
    return base


def _fuse(bases: list[nn.Linear]) -> list[tuple[Weight, Tensor | None]]:
    """(weight, bias) of each product to compute: one for all linears where their storage allows, else one each."""
    weights = [_weight(base) for base in bases]
    biases: list[Tensor] = [base.bias for base in bases if base.bias is not None]
    whole = _neighbours(weights) if len(biases) in (0, len(bases)) else None
    if whole is None:
        return [(weight, base.bias) for weight, base in zip(weights, bases, strict=True)]
    return [(whole, torch.cat(biases) if biases else None)]


def _weight(base: nn.Linear) -> Weight:
    if not isinstance(base, PackedLinear):
        return base.weight.detach()
    return base.packed if isinstance(base.packed, PackedWeight) else [base.packed]


def _neighbours(weights: Sequence[Weight]) -> Weight | None:
    """The one weight that all of them are rows of, in order and without a gap; None if they are not."""
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    coded = [w for w in weights if isinstance(w, list)]
    dense = [w for w in weights if isinstance(w, Tensor)]
    if len(weights) not in (len(packed), len(coded), len(dense)):
        return None
    if coded:
        return [w for part in coded for w in part]
    return _neighbours_packed(packed) if packed else _neighbours_dense(dense)


def _neighbours_packed(weights: list[PackedWeight]) -> PackedWeight | None:
    first = weights[0]
    parts, end = [], first.first_row
    for w in weights:
        if w.storage is not first.storage or w.first_row != end:
            return None
        parts += [part._replace(start=w.first_row - first.first_row + part.start) for part in w.parts]
        end += w.padded_shape[0]
    return PackedWeight(first.storage, first.columns, tuple(parts), first.first_row)


def _neighbours_dense(weights: list[Tensor]) -> Tensor | None:
    first = weights[0]
    end = first.storage_offset()
    for w in weights:
        same = w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and w.dtype == first.dtype
        if not same or not w.is_contiguous() or w.storage_offset() != end:
            return None
        end += w.numel()
    return first.as_strided((sum(len(w) for w in weights), first.shape[1]), first.stride())


def _with_spare_rows(bases: Sequence[nn.Linear]) -> Tensor | None:
    """The dense weights and the free rows behind them as one; None where they are not, or some have a bias."""
    spare = getattr(bases[-1], "spare_rows", None)
    weights = [_weight(base) for base in bases]
    if spare is None or not len(spare) or len({base.bias is None for base in bases}) != 1:
        return None
    if not all(isinstance(weight, Tensor) for weight in weights):
        return None
    whole = _neighbours([*weights, spare])
    assert whole is None or isinstance(whole, Tensor)
    return whole


def _packed_whole(products: Sequence[tuple[Weight, Tensor | None]]) -> PackedWeight | None:
    """The packed weight that is all of the product; None where there are several, or a dense one."""
    weight = products[0][0]
    return weight if len(products) == 1 and isinstance(weight, PackedWeight) else None


def _product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    adapter: PackedAdapter | None,
    announcement: Announcement | None = None,
) -> Tensor:
    if isinstance(weight, PackedWeight):
        return w4a16(x, weight, bias, adapter, announcement)
    return coded_product(x, weight, bias) if isinstance(weight, list) else F.linear(x, weight, bias)

"""Who computes x W^T in bench_w4a16, each from weights in its own form.

    random bits of NVFP4 or MXFP4 -> Peer.weights -> n copies, each in memory of its own
    Peer.multiply(x, copy, out) -> y: `out`, or memory of its own where the peer allocates

    name        weights                             product
    cublas      bf16, 2 bytes a weight              torch.mm
    humming     4.5 bits, its own order             humming-kernels (PyPI), the tuning that it recommends for each shape
    qerl        4.5 bits, kernels/layout.py         kernels/w4a16, x plain [M, K]
    qerl+lora   the same and a LoRA adapter, r = 32, for every part

All get the same weights. The global scale is a power of two, so that bf16 holds them exactly and one float64 product is
everybody's reference.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import BFloat16, Float, Float64
from torch import Tensor

from qerl.formats import mxfp4, nvfp4
from qerl.formats.mxfp4 import MXFP4Tensor
from qerl.formats.nvfp4 import NVFP4Tensor
from qerl.kernels.w4a16 import PackedAdapter, PackedWeight, pack, pack_adapter, w4a16

Format = Literal["nvfp4", "mxfp4"]
Parts = Sequence[NVFP4Tensor] | Sequence[MXFP4Tensor]
"""The quantised matrices of one fused product, which lie one under the other."""

LORA_RANK = 32
LORA_SHARE = 0.2  # standard deviation of the adapter's output over the product's

_E4M3_BYTES = (0x30, 0x47)  # 0.5 .. 3.75
_E8M0_BYTES = (116, 122)  # 2^-11 .. 2^-5
_GLOBAL_SCALE = 2.0**-8


def random_parts(rows: Sequence[int], columns: int, fmt: Format, generator: torch.Generator) -> Parts:
    """Matrices of so many rows each: uniform codes, scale bytes uniform in a range without NaN."""
    device = generator.device

    def draw(n: int, k: int, first: int, last: int) -> Tensor:
        return torch.randint(first, last + 1, (n, k), dtype=torch.uint8, device=device, generator=generator)

    codes = [draw(n, columns // 2, 0, 255) for n in rows]
    if fmt == "mxfp4":
        return [MXFP4Tensor(c, draw(len(c), columns // mxfp4.BLOCK, *_E8M0_BYTES)) for c in codes]
    scales = [draw(len(c), columns // nvfp4.BLOCK, *_E4M3_BYTES).view(torch.float8_e4m3fn) for c in codes]
    global_scale = torch.full((1,), _GLOBAL_SCALE, device=device)
    return [NVFP4Tensor(c, s, global_scale) for c, s in zip(codes, scales, strict=True)]


def dense(part: NVFP4Tensor | MXFP4Tensor) -> Float[Tensor, "n k"]:
    """The matrix in float32; bf16 would hold it too."""
    return nvfp4.dequantize(part) if isinstance(part, NVFP4Tensor) else mxfp4.dequantize(part)


class Peer(Protocol):
    """A contender; `Any` is its own form of a weight."""

    name: str
    bytes_a_weight: float

    def weights(self, parts: Parts, copies: int) -> list[Any]:
        """The fused product of `parts`, `copies` times."""
        ...

    def multiply(self, x: BFloat16[Tensor, "m k"], weight: Any, out: BFloat16[Tensor, "m n"]) -> Tensor: ...

    def expected(
        self, product: Float64[Tensor, "m n"], x: BFloat16[Tensor, "m k"], weight: Any
    ) -> Float64[Tensor, "m n"]:
        """What `multiply` should give, from x W^T in float64."""
        ...


class Cublas:
    """bf16 weights and torch.mm: what an unquantised model runs."""

    name = "cublas"
    bytes_a_weight = 2.0

    def weights(self, parts: Parts, copies: int) -> list[BFloat16[Tensor, "n k"]]:
        return _copied(torch.cat([dense(part).bfloat16() for part in parts]), copies)

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, weight.T, out=out)

    def expected(self, product: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return product


class Qerl:
    """This project's product."""

    name = "qerl"
    bytes_a_weight = 0.5625

    def weights(self, parts: Parts, copies: int) -> list[Any]:
        return _copied(pack(parts), copies)

    def multiply(self, x: Tensor, weight: PackedWeight, out: Tensor) -> Tensor:
        return w4a16(x, weight)

    def expected(self, product: Tensor, x: Tensor, weight: PackedWeight) -> Tensor:
        return product


class LoraWeight(NamedTuple):
    """A packed weight with its packed adapter, and that adapter's factors as they came."""

    packed: PackedWeight
    adapter: PackedAdapter
    factors: list[tuple[Tensor, Tensor, float]]
    """A [r, K], B [N, r] and the scaling, 1, of each part."""


class QerlLora:
    """This project's product with an adapter of its own for each part: y += (x A^T) B^T."""

    name = "qerl+lora"
    bytes_a_weight = 0.5625

    def weights(self, parts: Parts, copies: int) -> list[Any]:
        weight = pack(parts)
        k = weight.columns
        rms = float(dense(parts[0]).square().mean().sqrt())
        b_std = LORA_SHARE * rms * (k / LORA_RANK) ** 0.5  # x A^T has variance 1, x W^T K * rms^2
        factors = []
        for part in weight.parts:
            a = torch.randn(LORA_RANK, k, device=weight.device) / k**0.5
            factors.append((a, torch.randn(part.rows, LORA_RANK, device=weight.device) * b_std, 1.0))
        pairs = _copied((weight, pack_adapter(weight, factors)), copies)
        return [LoraWeight(packed, adapter, factors) for packed, adapter in pairs]

    def multiply(self, x: Tensor, weight: LoraWeight, out: Tensor) -> Tensor:
        return w4a16(x, weight.packed, adapter=weight.adapter)

    def expected(self, product: Tensor, x: Tensor, weight: LoraWeight) -> Tensor:
        # The packed factors are bf16; u is not rounded here.
        pairs = [(a.bfloat16().double(), b.bfloat16().double()) for a, b, _ in weight.factors]
        return product + torch.cat([x.double() @ a.T @ b.T for a, b in pairs], dim=1)


class HummingWeight(NamedTuple):
    """A weight in humming's order, with what its launcher wants beside it."""

    shape: tuple[int, int]
    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor | None
    """NVFP4's global scale [1]."""
    locks: Tensor
    """Stream-K state, one a layer: launches that overlap must not share it."""


class Humming:
    """humming-kernels 0.1.20, weights only quantised, bf16 activations, dense GEMM, float32 accumulation.

    It needs a CUDA toolkit of torch's major version (headers and NVRTC; no C++ compiler, its launcher comes built) and
    compiles a kernel for each shape and M, in `compile`, in parallel. The tuning is what its heuristics choose for
    exactly that shape and M, which is also what its own layer would run; `overlap` adds programmatic dependent launch,
    which they leave off on sm_90.
    """

    name = "humming"
    bytes_a_weight = 0.5625

    def __init__(self, fmt: Format, *, overlap: bool = False) -> None:
        """ImportError where the package is missing."""
        from humming import ops, transform, tune  # pyright: ignore[reportMissingImports]
        from humming.kernel.humming import HummingKernel  # pyright: ignore[reportMissingImports]
        from humming.schema import HummingWeightSchema  # pyright: ignore[reportMissingImports]

        self._ops, self._transform, self._tune, self._kernel = ops, transform, tune, HummingKernel
        options = {
            "nvfp4": {"bs_dtype": "float8e4m3", "weight_scale_group_size": 16, "weight_scale_2_type": "tensor"},
            "mxfp4": {"bs_dtype": "float8e8m0", "weight_scale_group_size": 32},
        }[fmt]
        self._schema = HummingWeightSchema(b_dtype="float4e2m1", **options)
        self._overlap = {"use_pdl": True} if overlap else {}
        self._layers: dict[tuple[int, int], Any] = {}
        self._tunings: dict[tuple[int, int, int], str] = {}

    def compile(self, shapes: Iterable[tuple[int, int]], tokens: Sequence[int]) -> list[str]:
        """Compile the kernels of all shapes (N, K) at all M; what failed, a line each. Later calls find them ready."""
        device = torch.device("cuda", torch.cuda.current_device())
        jobs: dict[tuple[str, str], str] = {}
        problems: list[str] = []
        for n, k in shapes:
            for m in tokens:
                try:
                    jobs[self._layer(n, k).to_str(), self._tuning(n, k, m)] = f"humming: N={n} K={k} M={m}"
                except Exception as error:  # a shape that its heuristics refuse; the others still run
                    problems.append(f"humming: N={n} K={k} M={m}: {error!r}")

        def build(job: tuple[str, str]) -> str | None:
            try:
                self._kernel.prepare_kernels(job[0], None, job[1], device)
            except Exception as error:
                return f"{jobs[job]}: {error!r}"
            return None

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return problems + [problem for problem in pool.map(build, jobs) if problem]

    def weights(self, parts: Parts, copies: int) -> list[HummingWeight]:
        packed = torch.cat([part.packed for part in parts])
        scales = torch.cat([part.block_scale.view(torch.uint8) for part in parts])
        n, k = packed.shape[0], packed.shape[1] * 2
        tensors = {"weight": packed.view(torch.int32)}
        if isinstance(parts[0], NVFP4Tensor):
            tensors["weight_scale"] = scales.view(torch.float8_e4m3fn)
            tensors["weight_scale_2"] = parts[0].global_scale
        else:
            tensors["weight_scale"] = scales.view(torch.float8_e8m0fnu)
        ready = self._transform.transform_humming_tensors(self._layer(n, k), tensors)
        locks = torch.zeros(2048, dtype=torch.int32, device=packed.device)  # the size that its own layer allocates
        first = HummingWeight((n, k), ready["weight"], ready["weight_scale"], ready.get("weight_scale_2"), locks)
        return _copied(first, copies)

    def multiply(self, x: Tensor, weight: HummingWeight, out: Tensor) -> Tensor:
        return self._ops.humming_gemm(
            layer_config=self._layer(*weight.shape).to_str(),
            tuning_config=self._tuning(*weight.shape, x.shape[0]),
            inputs=x,
            weight=weight.weight,
            weight_scale=weight.weight_scale,
            weight_scale_2=weight.weight_scale_2,
            outputs=out,
            locks=weight.locks,
        )

    def expected(self, product: Tensor, x: Tensor, weight: HummingWeight) -> Tensor:
        return product

    def _layer(self, n: int, k: int) -> Any:
        if (n, k) not in self._layers:
            self._layers[n, k] = self._transform.prepare_layer_config(n, k, self._schema, torch_dtype=torch.bfloat16)
        return self._layers[n, k]

    def _tuning(self, n: int, k: int, m: int) -> str:
        if (n, k, m) not in self._tunings:
            chosen = self._tune.get_heuristics_config(self._layer(n, k), shape_m=m)
            self._tunings[n, k, m] = json.dumps(chosen | self._overlap)
        return self._tunings[n, k, m]


def _copied(first: Any, copies: int) -> list[Any]:
    """Copies in memory of their own."""
    return [first, *(copy.deepcopy(first) for _ in range(copies - 1))]

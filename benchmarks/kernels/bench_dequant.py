"""Bandwidth of kernels/dequant beside a device-to-device copy, and what a launch of kernels/w4a16 costs the host.

    python benchmarks/kernels/bench_dequant.py [--models 7B 32B] [--run ID]

dequant reads 0.5625 bytes a weight and writes 2, into its one scratch buffer; it is timed as bench_w4a16 times
products. The copy moves 2 GiB, reads and writes counted. The bar is 75 % of the copy's bandwidth over the four
matrices of a layer.

The launch cost is the time of a call in eager mode while the GPU lags behind, torch.mm's beside it: the median over
batches of calls, each batch short enough that the launch queue never fills. The bar is 10 microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import harness
import torch
from bench_w4a16 import MODELS, Product
from peers import Cublas, Qerl, dense, random_parts
from torch import Tensor

from qerl.kernels.dequant import dequant
from qerl.kernels.w4a16 import w4a16

COPY_BYTES = 1 << 31
SHARE_OF_COPY = 0.75
LAUNCH_US = 10.0
BATCHES, CALLS = 30, 100


def copy_bandwidth(replays: int) -> float:
    """Bytes a second of a large copy, counted twice: read and written."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))  # a copy engine, a kernel
    return 2 * COPY_BYTES / min(harness.replay_us(harness.capture(way).graph, replays) for way in ways) * 1e6


def dequant_us(product: Product, replays: int) -> float:
    """Time of one matrix, its packed form not in any cache."""
    generator = torch.Generator("cuda").manual_seed(0)
    parts = random_parts(product.parts, product.columns, "nvfp4", generator)
    count = harness.copies_for(product.rows * product.columns * Qerl.bytes_a_weight)
    weights = Qerl().weights(parts, count) * harness.passes_for(count)

    def launch() -> Tensor:
        for weight in weights[:-1]:
            dequant(weight, torch.bfloat16)
        return dequant(weights[-1], torch.bfloat16)

    captured = harness.capture(launch)
    y = weights[-1].without_row_padding(harness.poisoned_replay(captured))[:, : product.columns]
    exact = torch.cat([dense(part) for part in parts]) / weights[-1].row_scale.unsqueeze(1)
    assert torch.equal(y.float(), exact), f"dequant of {product} is wrong"
    return harness.replay_us(captured.graph, replays) / len(weights)


def launch_us(call: Callable[[], object]) -> float:
    """Host time of a call, in microseconds."""
    for _ in range(10):
        call()
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def bench_dequant(model: str, copy: float, replays: int) -> dict[str, Any]:
    """Times of one model's matrices, printed, and the record."""
    times: dict[str, float] = {}
    moved = 0.0
    for product in sorted(MODELS[model], key=lambda p: -p.rows * p.columns):  # the scratch buffer grows once
        size = product.rows * product.columns * (Qerl.bytes_a_weight + 2)
        moved += size
        times[product.name] = us = dequant_us(product, replays)
        print(
            f"  {product.name:8} {us:8.1f} us  {size / us / 1e6:5.2f} TB/s  {size / us * 1e6 / copy:6.1%} of the copy"
        )
        torch.cuda.empty_cache()
    total = sum(times.values())
    share = moved / total * 1e6 / copy
    verdict = "ok" if share >= SHARE_OF_COPY else "MISS"
    layer = f"{total:8.1f} us  {moved / total / 1e6:5.2f} TB/s  {share:6.1%} of the copy"
    print(f"  {'layer':8} {layer}, bar {SHARE_OF_COPY:.0%} {verdict}")
    by_product = {name: round(us, 2) for name, us in times.items()}
    return {"bench": "dequant", "model": model, "us": round(total, 2), "by_product": by_product, "share_of_copy": share}


def bench_launch(product: Product, m: int) -> dict[str, Any]:
    """Host cost of one shape, printed, and the record. Few tokens and a small matrix: the GPU keeps up."""
    parts = random_parts(product.parts, product.columns, "nvfp4", torch.Generator("cuda"))
    x = torch.randn(m, product.columns, device="cuda").bfloat16()
    weight, transposed = Qerl().weights(parts, 1)[0], Cublas().weights(parts, 1)[0].T
    own, cublas = launch_us(lambda: w4a16(x, weight)), launch_us(lambda: torch.mm(x, transposed))
    verdict = "ok" if own <= LAUNCH_US else "MISS"
    print(f"  {product.name:8} M={m}: {own:5.1f} us, bar {LAUNCH_US:g} {verdict}; torch.mm {cublas:.1f} us")
    shape = [product.rows, product.columns]
    return {"bench": "w4a16_launch", "M": m, "shape": shape, "us": round(own, 2), "cublas_us": round(cublas, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["7B", "32B"], help="default: 7B 32B")
    parser.add_argument("--replays", type=int, default=15, help="of each graph; the median counts")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_dequant needs a CUDA GPU")

    gpu = torch.cuda.get_device_name()
    copy = copy_bandwidth(args.replays)
    common: Mapping[str, Any] = {
        "run": args.run,
        "commit": args.commit or harness.commit(),
        "gpu": gpu,
        "versions": harness.versions(triton="triton"),
    }
    print(f"{gpu}: a device-to-device copy moves {copy / 1e12:.2f} TB/s")
    records: list[dict[str, Any]] = []
    for model in args.models:
        print(f"dequant, Qwen2.5-{model}")
        records.append(bench_dequant(model, copy, args.replays) | {"copy_tb_s": round(copy / 1e12, 3), **common})
    print("launch of w4a16 in eager mode, host time")
    records += [{**bench_launch(MODELS["0.5B"][1], m), **common} for m in (1, 64)]
    harness.write(records, args.out, gpu)


if __name__ == "__main__":
    main()

"""Decode speed of the engine on random weights of Qwen2.5's shapes, by format and batch size.

    python benchmarks/engine/bench_decode.py [--models 7B 32B] [--formats nvfp4 bf16] [--batch 1 8 ..] [--rank 32]
                                             [--kv-cache-dtype fp8] [--head-format nvfp4]

A run generates `--new` tokens after prompts of `--prompt` tokens (no token ends a completion), once to compile and
capture, then to measure: steps, and what is left when one token is asked for, which is prefill. A step's time is the
difference over the steps between. Then the update of adapters and norms (with its probe), and sleep, wake and what the
first tokens cost more after it. From batch 32 on, prompts are shared by 8. The floor is the bytes that a step must
read (products' weights, head, adapters, keys and values) at 4.2 TB/s. `--profile` adds the kernels of a step.

Records are appended to benchmarks/results/<gpu>.jsonl, or to --out FILE ("-" prints them).
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import harness

from qerl.bench.models import SIZES, RandomWeights, write_folder
from qerl.config import LoraConfig, ModelConfig, RolloutConfig
from qerl.engine.engine import PagedEngine
from qerl.engine.kv_cache import token_bytes
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora
from qerl.types import Request, SamplingParams

BANDWIDTH = 4.2e12
LORA_STD = 0.01  # of B
GROUP, GROUPED_FROM = 8, 32
_PROFILED = 64  # steps


WEIGHT_BYTES = {"bf16": 2.0, "nvfp4": 0.5625, "mxfp4": 0.53125}


def floor_bytes(size: str, fmt: str, rank: int, batch: int, context: float, config: RolloutConfig) -> float:
    """What one decode step reads: each weight once, keys and values of every sequence."""
    s = SIZES[size]
    head_dim = s.hidden // s.heads
    kv = s.kv_heads * head_dim
    ins_outs = [
        (s.hidden, s.hidden + 2 * kv),
        (s.hidden, s.hidden),
        (s.hidden, 2 * s.intermediate),
        (s.intermediate, s.hidden),
    ]
    weights = sum(k * n for k, n in ins_outs) * WEIGHT_BYTES[fmt]
    parts = (3, 1, 2, 1)
    adapters = sum(rank * (p * k + n) for p, (k, n) in zip(parts, ins_outs, strict=True)) * 2
    cache = batch * context * token_bytes(s.kv_heads, head_dim, 2, fp8=config.kv_cache_dtype == "fp8")
    head = s.vocabulary * s.hidden * WEIGHT_BYTES["nvfp4" if config.head_format == "nvfp4" else "bf16"]
    return s.layers * (weights + adapters + cache) + head


def policy(size: str, fmt: str, rank: int) -> nn.Module:
    """The model of that size, format and random weights, with adapters on all seven projections (rank 0: without)."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), size)
        config = ModelConfig.model_validate({"path": folder, "format": fmt, "device": "cuda"})
        model, _ = load_model(config, RandomWeights(config, torch.device("cuda")))
    if rank == 0:
        return model
    adapted = attach_lora(model, LoraConfig(r=rank, alpha=rank), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, LORA_STD)
    return adapted


def requests(batch: int, prompt: int, new: int, vocabulary: int) -> list[Request]:
    shared = GROUP if batch >= GROUPED_FROM else 1
    generator = torch.Generator().manual_seed(batch)
    return [
        Request(
            prompt_ids=torch.randint(0, vocabulary, (prompt,), generator=generator).tolist(),
            seeds=[1000 * i + j for j in range(shared)],
            max_new_tokens=new,
            prompt_index=i,
        )
        for i in range(batch // shared)
    ]


def timed(engine: PagedEngine, batch: int, prompt: int, new: int, vocabulary: int, sampling: SamplingParams) -> float:
    asked = requests(batch, prompt, new, vocabulary)
    torch.cuda.synchronize()
    start = time.perf_counter()
    done = engine.generate(asked, sampling)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert all(len(c.token_ids) == new for group in done for c in group)
    return seconds


def seconds_of(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def profile(run: Any, steps: int) -> None:
    """Kernels of the steps by time, and how much of the span none ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in prof.events() if e.device_type.name == "CUDA")
    totals: dict[str, list[float]] = {}
    for e in prof.events():
        if e.device_type.name == "CUDA":
            totals.setdefault(e.name[:60], []).append(e.time_range.elapsed_us())
    busy, end = 0.0, 0.0
    for a, b in spans:
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    span = spans[-1][1] - spans[0][0]
    print(
        f"    {span / steps:.0f} us a step, {busy / steps:.0f} with a kernel running, {len(spans) / steps:.0f} launches"
    )
    for name, us in sorted(totals.items(), key=lambda item: -sum(item[1]))[:22]:
        print(f"      {sum(us) / steps:8.1f} us {len(us) / steps:7.1f} x {sum(us) / len(us):7.2f}  {name}")


def bench(
    model: nn.Module, size: str, fmt: str, args: argparse.Namespace, common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    vocabulary = SIZES[size].vocabulary
    sampling = SamplingParams(temperature=1.0)
    settings = {"kv_cache_dtype": args.kv_cache_dtype, "head_format": args.head_format}
    config = RolloutConfig.model_validate({**settings, "max_completion_length": args.new})
    print(f"{size} {fmt}:", *(f"{name} {value}" for name, value in settings.items()))
    for batch in args.batch:
        engine = PagedEngine(model, eos_ids=[vocabulary], config=config)
        started = time.perf_counter()
        timed(engine, batch, args.prompt, args.new, vocabulary, sampling)
        first = time.perf_counter() - started
        whole = timed(engine, batch, args.prompt, args.new, vocabulary, sampling)
        short = timed(engine, batch, args.prompt, 9, vocabulary, sampling)
        step = (whole - short) / (args.new - 9)
        sync = seconds_of(partial(engine.sync, None))
        engine.sleep()
        wake = seconds_of(engine.wake)
        captured = timed(engine, batch, args.prompt, 9, vocabulary, sampling) - short
        context = args.prompt + (args.new + 9) / 2
        floor = floor_bytes(size, fmt, args.rank, batch, context, config) / BANDWIDTH
        record = (
            {
                "bench": "decode", "model": size, "format": fmt, "lora_rank": args.rank, "batch": batch,
                "distinct_prompts": len(requests(batch, 1, 1, vocabulary)), "prompt": args.prompt, "new": args.new,
                **settings, "step_ms": round(step * 1e3, 4), "floor_ms": round(floor * 1e3, 4),
                "tokens_per_s": round(batch / step, 1), "prefill_s": round(short - 9 * step, 4),
                "first_s": round(first, 2),
                "sync_ms": round(sync * 1e3, 2), "wake_ms": round(wake * 1e3, 2), "recapture_s": round(captured, 3),
                "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            } | common
        )  # fmt: skip
        print(
            f"{size} {fmt} r{args.rank} batch {batch}: step {step * 1e3:.3f} ms ({step / floor:.2f} x floor), "
            f"{batch / step:.0f} tokens/s, prefill {short - 9 * step:.3f} s, first call {first:.1f} s, "
            f"sync {sync * 1e3:.0f} ms, wake {wake * 1e3:.0f} ms, graphs again {captured:.2f} s",
            flush=True,
        )
        if batch in args.profile:
            profile(partial(timed, engine, batch, args.prompt, _PROFILED, vocabulary, sampling), _PROFILED)
        yield record
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["7B"])
    parser.add_argument("--formats", nargs="+", choices=("nvfp4", "mxfp4", "bf16"), default=["nvfp4", "bf16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters; 0: none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="as rollout.kv_cache_dtype")
    parser.add_argument("--head-format", choices=("auto", "nvfp4"), default="auto", help="as rollout.head_format")
    parser.add_argument("--profile", nargs="*", type=int, default=[], help="batch sizes whose kernels are listed")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    common = {"run": args.run, "commit": args.commit or harness.commit(), "gpu": gpu, "versions": harness.versions()}
    for size in args.models:
        for fmt in args.formats:
            started = time.perf_counter()
            model = policy(size, fmt, args.rank)
            torch.cuda.synchronize()
            made, held = time.perf_counter() - started, torch.cuda.memory_allocated() / 1e9
            print(f"{size} {fmt}: made in {made:.1f} s, {held:.1f} GB", flush=True)
            for record in bench(model, size, fmt, args, common):
                harness.write([record], args.out, gpu)
            del model
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

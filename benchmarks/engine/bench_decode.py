"""Decode speed of the engine on random weights of Qwen2.5's shapes, by format, adapters' rank and batch size.

    python benchmarks/engine/bench_decode.py [--models 7B 32B] [--formats nvfp4 bf16 mxfp4 transformers]
                                             [--batch 1 8 ..] [--rank 16 32 64] [--steps 0] [--distinct]
                                             [--kv-cache-dtype fp8] [--head-format nvfp4]

What is asked for are `--prompt` and `--new` tokens (no token ends a completion). A step's time grows linearly with its
context, so the mean over the new tokens is that of `--steps` steps around the middle: prompts are as long as would be
there by then, and the steps' time is what a call for so many tokens takes more than one for nine. (`--steps 0` runs
them all.) A run before compiles and captures. Then the update of adapters and norms (with its probe), and sleep, wake
and what the first tokens cost more after it. From batch 32 on, prompts are shared by 8, unless `--distinct`. The floor
is the bytes that a step must read (products' weights, head, adapters, keys and values) at 4.2 TB/s. The format
"transformers" is generate() of transformers and PEFT, as they come, over a bf16 model of the shape. `--profile` adds
the kernels of a step.

Records are appended to benchmarks/results/<gpu>.jsonl, or to --out FILE ("-" prints them); a table comes at the end.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import harness

from qerl.bench.models import SIZES, RandomWeights, qwen2_config, write_folder
from qerl.config import LoraConfig, ModelConfig, RolloutConfig
from qerl.engine.engine import PagedEngine
from qerl.engine.kv_cache import token_bytes
from qerl.engine.mapped import mapped_bytes
from qerl.nn.load import load_model
from qerl.nn.lora import attach_lora
from qerl.types import Request, SamplingParams

BANDWIDTH = 4.2e12
LORA_STD = 0.01  # of B
GROUP, GROUPED_FROM = 8, 32
SHORT = 9  # tokens of the shorter of two calls
_PROFILED = 64  # steps
_TRANSFORMERS_STEPS = 24

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
    return adapted(base(size, fmt, rank), rank)


def base(size: str, fmt: str, rank: int) -> nn.Module:
    """The model, with room for adapters of that rank."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), size)
        config = ModelConfig.model_validate({"path": folder, "format": fmt, "device": "cuda"})
        model, _ = load_model(config, RandomWeights(config, torch.device("cuda")), adapter_rank=rank)
    return model


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """The model with adapters whose B is not zero."""
    if rank == 0:
        return model
    with_lora = attach_lora(cast(PreTrainedModel, model), LoraConfig(r=rank, alpha=rank), seed=0)
    with torch.no_grad():
        for name, parameter in with_lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, LORA_STD)
    return with_lora


def window(prompt: int, new: int, steps: int) -> tuple[int, int]:
    """(prompt, new tokens) of the call whose steps stand for all: as many as `steps` around the middle; 0: all."""
    if steps == 0 or steps + SHORT >= new:
        return prompt, new
    return prompt + (new - steps) // 2 - SHORT, steps + SHORT


def requests(batch: int, prompt: int, new: int, vocabulary: int, *, distinct: bool = False) -> list[Request]:
    shared = GROUP if batch >= GROUPED_FROM and not distinct else 1
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


def timed(engine: PagedEngine, asked: list[Request], sampling: SamplingParams) -> float:
    """Seconds of a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    done = engine.generate(asked, sampling)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert all(len(c.token_ids) == r.max_new_tokens for r, group in zip(asked, done, strict=True) for c in group)
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


def bench(model: nn.Module, size: str, rank: int, fmt: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The records of one model by batch size."""
    vocabulary = SIZES[size].vocabulary
    sampling = SamplingParams(temperature=1.0)
    settings = {"kv_cache_dtype": args.kv_cache_dtype, "head_format": args.head_format}
    prompt, new = window(args.prompt, args.new, args.steps)
    config = RolloutConfig.model_validate({**settings, "max_completion_length": new, "speculation": False})
    print(f"{size} {fmt}:", *(f"{name} {value}" for name, value in settings.items()))
    for batch in args.batch:
        engine = PagedEngine(model, eos_ids=[vocabulary], config=config)
        whole_call, short_call, profiled = (
            requests(batch, prompt, n, vocabulary, distinct=args.distinct) for n in (new, SHORT, _PROFILED)
        )
        first = timed(engine, whole_call, sampling)
        whole = timed(engine, whole_call, sampling)
        short = timed(engine, short_call, sampling)
        step = (whole - short) / (new - SHORT)
        with torch.inference_mode():
            sync, copies = (seconds_of(partial(f, None)) for f in (engine.sync, engine._decoder.sync))
        engine.sleep()
        wake = seconds_of(engine.wake)
        after_wake = timed(engine, short_call, sampling) - short
        floor = floor_bytes(size, fmt, rank, batch, prompt + (new + SHORT) / 2, config) / BANDWIDTH
        yield {
            **measured(size, fmt, rank, batch, len(whole_call), step, floor, args), **settings,
            "prefill_s": round(short - SHORT * step, 4), "first_s": round(first, 2),
            "sync_ms": round(sync * 1e3, 2), "copy_ms": round(copies * 1e3, 2), "wake_ms": round(wake * 1e3, 2),
            "after_wake_s": round(after_wake, 3),
            "peak_gb": round((torch.cuda.max_memory_allocated() + mapped_bytes(torch.device("cuda"))) / 1e9, 2),
        }  # fmt: skip
        print(
            f"    prefill {short - SHORT * step:.3f} s, first call {first:.1f} s, sync {sync * 1e3:.0f} ms "
            f"({copies * 1e3:.0f} without its probe), wake {wake * 1e3:.0f} ms and {after_wake:.2f} s",
            flush=True,
        )
        if batch in args.profile:
            profile(partial(timed, engine, profiled, sampling), _PROFILED)
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def bench_transformers(size: str, rank: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same of transformers' own generate()."""
    with torch.device("cuda"):
        policy: Any = AutoModelForCausalLM.from_config(qwen2_config(size), dtype=torch.bfloat16)
        if rank:
            lora = PeftLoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False)
            policy = get_peft_model(policy, lora, autocast_adapter_dtype=False)
    policy.eval()
    prompt, _ = window(args.prompt, args.new, args.steps)
    for batch in args.batch:
        ids = torch.randint(0, SIZES[size].vocabulary, (batch, prompt), device=policy.device)

        seen = torch.ones_like(ids)

        def seconds(new: int, ids: torch.Tensor = ids, seen: torch.Tensor = seen) -> float:
            config = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
            return seconds_of(lambda: policy.generate(ids, attention_mask=seen, generation_config=config))

        try:
            seconds(SHORT)
            step = (seconds(SHORT + _TRANSFORMERS_STEPS) - seconds(SHORT)) / _TRANSFORMERS_STEPS
        except torch.OutOfMemoryError:
            print(f"{size} transformers r{rank} batch {batch}: out of memory", flush=True)
            continue
        context = prompt + SHORT + _TRANSFORMERS_STEPS / 2
        floor = floor_bytes(size, "bf16", rank, batch, context, RolloutConfig()) / BANDWIDTH
        yield measured(size, "transformers", rank, batch, batch, step, floor, args)


def measured(
    size: str, fmt: str, rank: int, batch: int, distinct: int, step: float, floor: float, args: argparse.Namespace
) -> dict[str, Any]:
    """The part that all records have, printed in a line."""
    print(
        f"{size} {fmt} r{rank} batch {batch}: step {step * 1e3:.3f} ms ({step / floor:.2f} x floor), "
        f"{batch / step:.0f} tokens/s",
        flush=True,
    )
    return {
        "bench": "decode", "model": size, "format": fmt, "lora_rank": rank, "batch": batch,
        "distinct_prompts": distinct, "prompt": args.prompt, "new": args.new, "steps": args.steps,
        "step_ms": round(step * 1e3, 4), "floor_ms": round(floor * 1e3, 4), "tokens_per_s": round(batch / step, 1),
        "run": args.run, "commit": args.commit or harness.commit(), "gpu": torch.cuda.get_device_name(),
        "versions": harness.versions(),
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """Milliseconds a step (x floor) of each format by model, rank and batch, and how much faster than bf16 it is."""
    rows: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for r in records:
        rows.setdefault((r["model"], r["lora_rank"], r["batch"]), {})[r["format"]] = r
    formats = list(dict.fromkeys(r["format"] for r in records))
    lines = ["| model | rank | batch | " + " | ".join(formats) + " |", "|---" * (3 + len(formats)) + "|"]
    for (size, rank, batch), row in rows.items():
        cells = []
        for fmt in formats:
            r, bf16 = row.get(fmt), row.get("bf16")
            cell = "-" if r is None else f"{r['step_ms']:.2f} ({r['step_ms'] / r['floor_ms']:.2f})"
            if r is not None and bf16 is not None and fmt != "bf16":
                cell += f", {bf16['step_ms'] / r['step_ms']:.2f}x"
            cells.append(cell)
        lines.append(f"| {size} | {rank} | {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["7B"])
    formats = ("nvfp4", "mxfp4", "bf16", "transformers")
    parser.add_argument("--formats", nargs="+", choices=formats, default=["nvfp4", "bf16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=96, help="measured around the middle of the new tokens; 0: all")
    parser.add_argument("--rank", nargs="+", type=int, default=[32], help="of the adapters; 0: none")
    parser.add_argument("--distinct", action="store_true", help="a prompt of its own for every completion")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="as rollout.kv_cache_dtype")
    parser.add_argument("--head-format", choices=("auto", "nvfp4"), default="auto", help="as rollout.head_format")
    parser.add_argument("--profile", nargs="*", type=int, default=[], help="batch sizes whose kernels are listed")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    records = []
    for size in args.models:
        for storage in args.formats:
            if storage == "transformers":
                for record in chain(*(bench_transformers(size, rank, args) for rank in args.rank)):
                    harness.write([record], args.out, record["gpu"])
                    records.append(record)
                gc.collect()
                torch.cuda.empty_cache()
                continue
            started = time.perf_counter()
            bare = base(size, storage, max(args.rank))
            torch.cuda.synchronize()
            made, held = time.perf_counter() - started, torch.cuda.memory_allocated() / 1e9
            print(f"{size} {storage}: made in {made:.1f} s, {held:.1f} GB", flush=True)
            for rank in args.rank:
                model = adapted(bare, rank)
                for record in bench(model, size, rank, storage, args):
                    harness.write([record], args.out, record["gpu"])
                    records.append(record)
                if isinstance(model, PeftModel):
                    bare = cast(Any, model).unload()
                del model
                gc.collect()
            del bare
            gc.collect()
            torch.cuda.empty_cache()
    print(table(records))


if __name__ == "__main__":
    main()

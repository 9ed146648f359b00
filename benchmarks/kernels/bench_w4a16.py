"""Time of a transformer layer's four products, x W^T with 4-bit W, beside cuBLAS bf16 and humming-kernels.

    python benchmarks/kernels/bench_w4a16.py [--models 7B 32B] [--m 1 8 16 ..] [--lora] [--format mxfp4] [--run ID]

The products are those of Qwen2.5: fused q,k,v; o; fused gate,up; down. Two measures, the same for every contender:

    products    each product on its own: a graph of passes over cold copies of its weights, time / launches; the four
                are added. This is what the bars below are about.
    layer       a graph of the four products in sequence over the weights of several layers, time / layers: here the
                start of one launch may overlap the end of another, as in a decode step.

harness.py says how a graph is timed. Before it is timed, one replay into poisoned memory is checked against float64
over the dequantised weights; what is wrong, or raises, is not timed but reported. The floor is the larger of the
4.5-bit weight bytes at 4.2 TB/s and the FLOPs at 790 TFLOP/s, both measured on an H200.

The table ends the output; the records, one JSON line for each model, M and measure, are appended to
benchmarks/results/<gpu>.jsonl (or --out FILE; "-" prints them).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args

import harness
import torch
from peers import Cublas, Format, Humming, Peer, Qerl, QerlLora, dense, random_parts
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)

BANDWIDTH = 4.2e12  # bytes a second that a copy reaches on an H200
FLOPS = 790e12  # bf16 products of random numbers on an H200, a second
BITS_A_WEIGHT = 4.5

WRONG = 1e-2  # relative error of a product that is not computed right; rounding y to bf16 alone gives 1.7e-3
MAX_ERROR = 2e-3  # what kernels/w4a16 has to stay below

# Speed-up over cuBLAS bf16 that kernels/w4a16 has to reach, by model and M; over humming it is 1, up to this M.
BARS: Mapping[str, Mapping[int, float]] = {
    "32B": {1: 3.4, 8: 3.2, 16: 2.8, 32: 2.4, 64: 2.0, 128: 1.4, 256: 0.98, 512: 0.92, 1024: 0.92},
    "7B": {1: 3.0, 8: 2.9, 16: 2.6, 32: 2.2, 64: 1.8, 128: 1.3, 256: 0.95, 512: 0.88, 1024: 0.88},
}
HUMMING_MAX_M = 256
# Added cost of an adapter of rank 32, at most, up to this M.
LORA_BARS: Mapping[str, float] = {"32B": 0.08, "7B": 0.12}
LORA_MAX_M = 64

# cuBLAS bf16 on a healthy H200 (CUDA 13.0, torch 2.11), microseconds for the four products: measured once, by the
# `products` method. A card that is far off is busy, hot or throttled, and the run's ratios are worth little.
CUBLAS_US: Mapping[str, Mapping[int, float]] = {
    "7B": {1: 134.3, 8: 136.1, 16: 136.1, 32: 138.0, 64: 137.6, 128: 140.7, 256: 185.3, 1024: 625.7},
    "32B": {1: 271.2, 8: 259.0, 16: 253.9, 32: 255.3, 64: 263.1, 128: 272.8, 256: 370.9, 1024: 1340.9},
}
HEALTHY = 0.10


class Product(NamedTuple):
    """One fused linear, y = x W^T."""

    name: str
    parts: tuple[int, ...]
    """Rows of each linear in it."""
    columns: int

    @property
    def rows(self) -> int:
        return sum(self.parts)


def layer(hidden: int, intermediate: int, key_value: int) -> tuple[Product, ...]:
    """The four products of a Qwen2.5 layer; its query heads are as wide as its hidden state."""
    return (
        Product("qkv", (hidden, key_value, key_value), hidden),
        Product("o", (hidden,), hidden),
        Product("gate_up", (intermediate, intermediate), hidden),
        Product("down", (hidden,), intermediate),
    )


MODELS: Mapping[str, tuple[Product, ...]] = {
    "0.5B": layer(896, 4864, 128),
    "3B": layer(2048, 11008, 256),
    "7B": layer(3584, 18944, 512),
    "14B": layer(5120, 13824, 1024),
    "32B": layer(5120, 27648, 1024),
}


def floor_us(products: Iterable[Product], m: int) -> float:
    """The time that no kernel can beat: weight bytes over bandwidth or FLOPs over their rate, whichever is more."""
    weights = sum(p.rows * p.columns for p in products)
    return max(weights * BITS_A_WEIGHT / 8 / BANDWIDTH, 2 * m * weights / FLOPS) * 1e6


class Result(NamedTuple):
    """One contender's time, or why there is none."""

    us: float | None = None
    rel_err: float | None = None
    problem: str | None = None


class Case:
    """One product with everybody's weights, and what it should give."""

    def __init__(
        self, product: Product, peers: Sequence[Peer], fmt: Format, tokens: int, generator: torch.Generator
    ) -> None:
        """Random weights and `tokens` rows of x, where the generator is."""
        device = generator.device
        parts = random_parts(product.parts, product.columns, fmt, generator)
        self.product = product
        self.x = torch.randn(tokens, product.columns, device=device, generator=generator).bfloat16()
        self.out = torch.empty(tokens, product.rows, dtype=torch.bfloat16, device=device)
        self.exact = torch.cat([self.x.double() @ dense(part).double().T for part in parts], dim=1)
        self.weights: dict[str, list[Any]] = {}
        self.problems: dict[str, str] = {}
        for peer in peers:
            copies = harness.copies_for(product.rows * product.columns * peer.bytes_a_weight)
            weights, problem = attempt(peer.weights, parts, copies)
            if weights is None:
                self.problems[peer.name] = f"weights: {problem}"
            else:
                self.weights[peer.name] = weights

    def run(self, peer: Peer, m: int, index: int) -> Tensor:
        """One launch, with copy `index` (counted on and on) of the weights."""
        copies = self.weights[peer.name]
        return peer.multiply(self.x[:m], copies[index % len(copies)], self.out[:m])

    def measure(self, peer: Peer, m: int, replays: int) -> Result:
        """Capture, check, time."""
        if problem := self.problems.get(peer.name):
            return Result(problem=problem)
        copies = self.weights[peer.name]
        launches = len(copies) * harness.passes_for(len(copies))
        captured, problem = attempt(harness.capture, _sequence(lambda i: self.run(peer, m, i), launches))
        if captured is None:
            return Result(problem=problem)
        y = harness.poisoned_replay(captured)
        # The copies are equal, so the last launch's result is every launch's.
        error = harness.relative_error(y, peer.expected(self.exact[:m], self.x[:m], copies[0]))
        if not error < WRONG:
            return Result(rel_err=error, problem=f"wrong: relative error {error:.2g}")
        return Result(harness.replay_us(captured.graph, replays) / launches, error)


def layer_us(cases: Sequence[Case], peer: Peer, m: int, replays: int) -> float:
    """Time of the four products in sequence, a layer."""
    layer_bytes = sum(case.product.rows * case.product.columns for case in cases) * peer.bytes_a_weight
    layers = max(harness.copies_for(layer_bytes), harness.MIN_LAUNCHES)
    launch = _sequence(lambda i: cases[i % len(cases)].run(peer, m, i // len(cases)), layers * len(cases))
    return harness.replay_us(harness.capture(launch).graph, replays) / layers


def attempt(action: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> tuple[_T | None, str | None]:
    """The result, or what was raised: a contender's failure is reported and ends nothing."""
    try:
        return action(*args, **kwargs), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:300]


def record(
    model: str, m: int, measure: str, us: Mapping[str, float | None], rel_err: Mapping[str, float | None], **more: Any
) -> dict[str, Any]:
    """One line of the results: times by contender in microseconds, None where there is none."""
    own = us.get("qerl")

    def speedup(name: str) -> float | None:
        other = us.get(name)
        return round(other / own, 3) if own and other else None

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 2)

    line: dict[str, Any] = {
        "bench": "w4a16_layer",
        "model": model,
        "M": m,
        "measure": measure,
        "us": rounded(own),
        "cublas_us": rounded(us.get("cublas")),
        "humming_us": rounded(us.get("humming")),
        "speedup_vs_cublas": speedup("cublas"),
        "speedup_vs_humming": speedup("humming"),
        "floor_us": rounded(floor_us(MODELS[model], m)),
    }
    if "qerl+lora" in us:
        line["lora_us"] = rounded(us["qerl+lora"])
    # The largest error of the four products. NaN is no JSON: a text then.
    line["rel_err"] = {name: e if e is None or e == e else "nan" for name, e in rel_err.items()}
    return line | more


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as text, a block for each model and measure, the bars beside the ratios."""
    blocks: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for r in records:
        blocks.setdefault((r["model"], r["measure"]), []).append(r)
    lines: list[str] = []
    for (model, measure), rows in blocks.items():
        lora = any("lora_us" in r for r in rows)
        lines += ["", f"Qwen2.5-{model}, {measure}: microseconds a layer"]
        head = f"{'M':>5} {'qerl':>8} {'cublas':>8} {'humming':>8} {'floor':>8} | {'vs cublas':>9} {'bar':>10} |"
        head += f" {'vs humming':>10} {'bar':>10} | {'error':>7}"
        lines.append(head + (f" | {'+ LoRA':>8} {'cost':>7} {'bar':>10}" if lora else ""))
        lines += [_row(r, lora) for r in rows]
    return "\n".join(lines).lstrip("\n")


def cublas_health(records: Sequence[Mapping[str, Any]]) -> str:
    """Whether cuBLAS ran as it does on a healthy H200: one line a model that has figures to compare with."""
    lines = []
    for model, figures in CUBLAS_US.items():
        times = {r["M"]: r["cublas_us"] for r in records if r["model"] == model and r["measure"] == "products"}
        ratios = {m: times[m] / us for m, us in figures.items() if times.get(m)}
        if ratios:
            m, worst = max(ratios.items(), key=lambda item: abs(item[1] - 1))
            verdict = "those" if abs(worst - 1) <= HEALTHY else "NOT those"
            lines.append(
                f"{model}: cuBLAS times are {verdict} of a healthy card; farthest at M = {m}: {worst - 1:+.1%}"
            )
    return "\n".join(lines) or "no cuBLAS figures to compare with: whether the card is healthy is not known"


def _row(r: Mapping[str, Any], lora: bool) -> str:
    def number(value: float | None, form: str, width: int) -> str:
        return format("-" if value is None else format(value, form), f">{width}")

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    def verdict(text: str, value: float | None, met: Callable[[float], bool]) -> str:
        return f"{text} {'-' if value is None else 'ok' if met(value) else 'MISS'}"

    model, m = r["model"], r["M"]
    cublas, humming = r["speedup_vs_cublas"], r["speedup_vs_humming"]
    bar = BARS.get(model, {}).get(m)
    cublas_bar = "" if bar is None else verdict(f"{bar:g}x", cublas, lambda s: s >= bar)
    humming_bar = verdict(">1x", humming, lambda s: s > 1) if m <= HUMMING_MAX_M and model in BARS else ""
    error = r["rel_err"].get("qerl")
    text = f"{m:>5}" + "".join(f" {number(r[k], '.1f', 8)}" for k in ("us", "cublas_us", "humming_us", "floor_us"))
    text += f" | {ratio(cublas):>9} {cublas_bar:>10} | {ratio(humming):>10} {humming_bar:>10} |"
    text += f" {error:>7}" if isinstance(error, str) else f" {number(error, '.1e', 7)}"
    text += "!" if isinstance(error, str) or (error or 0) > MAX_ERROR else ""
    if lora:
        with_lora = r.get("lora_us")
        cost = with_lora / r["us"] - 1 if with_lora and r["us"] else None
        lora_bar = LORA_BARS.get(model) if m <= LORA_MAX_M else None
        limit = "" if lora_bar is None else verdict(f"{lora_bar:.0%}", cost, lambda c: c <= lora_bar)
        text += f" | {number(with_lora, '.1f', 8)} {number(cost, '+.1%', 7)} {limit:>10}"
    return text.rstrip()


def _sequence(launch: Callable[[int], Tensor], count: int) -> Callable[[], Tensor]:
    """Launches 0 .. count - 1; the result of the last (the others' memory is used again, as in a model)."""

    def run() -> Tensor:
        for i in range(count - 1):
            launch(i)
        return launch(count - 1)

    return run


def bench_model(
    model: str, tokens: Sequence[int], peers: Sequence[Peer], fmt: Format, replays: int, common: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of one model, and what went wrong, a line each."""
    generator = torch.Generator("cuda").manual_seed(0)
    cases = [Case(p, peers, fmt, max(tokens), generator) for p in MODELS[model]]
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for m in tokens:
        results: dict[str, dict[str, Result]] = {peer.name: {} for peer in peers}
        for case in cases:
            for peer in peers:  # one after the other, so that all see the card in the same state
                result = case.measure(peer, m, replays)
                results[peer.name][case.product.name] = result
                if result.problem:
                    problems.append(f"{model} M={m} {case.product.name} {peer.name}: {result.problem}")
        sums: dict[str, float | None] = {}
        layers: dict[str, float | None] = {}
        errors: dict[str, float | None] = {}
        for peer in peers:
            every = results[peer.name].values()
            times = [r.us for r in every if r.us is not None]
            known = [r.rel_err for r in every if r.rel_err is not None]
            errors[peer.name] = next((e for e in known if e != e), max(known, default=None))
            sums[peer.name] = layers[peer.name] = None
            if len(times) == len(cases):
                sums[peer.name] = sum(times)
                layers[peer.name], problem = attempt(layer_us, cases, peer, m, replays)
                if problem:
                    problems.append(f"{model} M={m} layer {peer.name}: {problem}")
        by_product = {
            p.name: {peer.name: us and round(us, 2) for peer in peers if (us := results[peer.name][p.name].us)}
            for p in MODELS[model]
        }
        records.append(record(model, m, "products", sums, errors, by_product=by_product, **common))
        records.append(record(model, m, "layer", layers, errors, **common))
        print(f"{model} M={m}: " + ", ".join(f"{k} {v:.1f}" if v else f"{k} -" for k, v in sums.items()), flush=True)
    return records, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["7B", "32B"], help="default: 7B 32B")
    parser.add_argument("--m", nargs="+", type=int, default=TOKENS, help="numbers of tokens")
    parser.add_argument("--format", choices=get_args(Format), default="nvfp4", help="of the weights")
    parser.add_argument("--lora", action="store_true", help="also with an adapter of rank 32 on every linear")
    parser.add_argument("--no-humming", action="store_true", help="without humming-kernels")
    parser.add_argument("--humming-pdl", action="store_true", help="humming with programmatic dependent launch")
    parser.add_argument("--replays", type=int, default=15, help="of each graph; the median counts")
    parser.add_argument("--quick", action="store_true", help="7B, M = 1 16 64 256, 5 replays, nothing written")
    parser.add_argument("--run", default=time.strftime("%Y%m%d-%H%M%S"), help="id of the run, in every record")
    parser.add_argument("--commit", default=None, help="in every record; default: what git says")
    parser.add_argument("--out", default=None, help="file to append to, - to print; default: by the GPU's name")
    args = parser.parse_args()
    if args.quick:
        args.models, args.m, args.replays, args.out = ["7B"], [1, 16, 64, 256], 5, args.out or "-"
    if not torch.cuda.is_available():
        raise SystemExit("bench_w4a16 needs a CUDA GPU")

    start = time.perf_counter()
    torch.manual_seed(0)
    peers: list[Peer] = [Qerl(), Cublas()]
    problems: list[str] = []
    if not args.no_humming:
        humming, problem = attempt(Humming, args.format, overlap=args.humming_pdl)
        if humming:
            shapes = [(p.rows, p.columns) for model in args.models for p in MODELS[model]]
            problems += humming.compile(shapes, args.m)
            print(f"humming: kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
            peers.append(humming)
        else:
            problems.append(f"humming is not in the run: {problem}")
    if args.lora:
        peers.append(QerlLora())

    gpu = torch.cuda.get_device_name()
    common = {
        "run": args.run,
        "commit": args.commit or harness.commit(),
        "gpu": gpu,
        "format": args.format,
        "versions": harness.versions(humming="humming-kernels", cuda_core="cuda-core", nvrtc="nvidia-cuda-nvrtc"),
    }
    records: list[dict[str, Any]] = []
    for model in args.models:
        more, troubles = bench_model(model, args.m, peers, args.format, args.replays, common)
        records += more
        problems += troubles
        torch.cuda.empty_cache()

    print("\n" + table(records))
    print("\n" + cublas_health(records))
    print(f"{gpu}, {args.format}, {', '.join(f'{k} {v}' for k, v in common['versions'].items())}")
    print(f"run {args.run} took {time.perf_counter() - start:.0f} s")
    if problems:
        print("\nnot timed:", *problems, sep="\n  ")
    harness.write(records, args.out, gpu)
    if any(r[key] is None for r in records for key in ("us", "lora_us") if key in r):
        sys.exit("kernels/w4a16 failed in places: see above")


if __name__ == "__main__":
    main()

"""Bits, error and speed of every format: `python benchmarks/formats.py [MODEL]`.

Prints, on numbers that each distribution makes (2048 x 2048, seed 0) and on the linears of a bf16 folder's decoder
layers where one is given, the squared error of the weights relative to the weights' own, in percent; and on this
machine's device, millions of weights a second: quantised, and dequantised to bf16.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from qerl.formats.checkpoint import Checkpoint
from qerl.formats.codes import BF16, INT4, MXFP4, NF4, NVFP4, Format, dequantize

FORMATS: dict[str, Format] = {
    "bf16": BF16(),
    "nvfp4": NVFP4(),
    "nvfp4, amax": NVFP4("amax"),
    "mxfp4": MXFP4(),
    "mxfp4, amax": MXFP4("amax"),
    "nf4": NF4(),
    "nf4, double_quant=false": NF4(double_quant=False),
    "int4": INT4(),
    "int4, group_size=64": INT4(64),
    "int4, group_size=32": INT4(32),
    "int4, symmetric": INT4(symmetric=True),
    "int4, amax": INT4(scale="amax"),
}


def laplace(size: tuple[int, int]) -> Tensor:
    u = torch.rand(size) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def student(size: tuple[int, int], degrees: int = 5) -> Tensor:
    return torch.randn(size) / (torch.randn(degrees, *size).square().mean(0)).sqrt()


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "Gaussian": torch.randn,
    "Laplace": laplace,
    "Student t, 5": student,
}


def linears(folder: Path) -> Iterator[Tensor]:
    checkpoint = Checkpoint(folder)
    for name in checkpoint.names():
        if ".layers." in name and name.endswith("_proj.weight"):
            yield checkpoint.tensor(name)


def percent(format: Format, weights: Iterator[Tensor]) -> float:
    """sum of (dequantised - w)^2 over sum of w^2, over all matrices."""
    error, signal = 0.0, 0.0
    for weight in weights:
        error += (dequantize(format.quantize(weight)) - weight.float()).double().square().sum().item()
        signal += weight.double().square().sum().item()
    return 100 * error / signal


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """The fastest of five calls."""
    best = math.inf
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="folder of a bf16 model")
    folder: Path | None = parser.parse_args().model
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns = [*DISTRIBUTIONS, *([folder.name] if folder else [])]
    print("| format | bits | " + " | ".join(columns) + " | quantise | dequantise |")
    print("|---" * (len(columns) + 4) + "|")
    for name, format in FORMATS.items():
        errors = []
        for make in DISTRIBUTIONS.values():
            torch.manual_seed(0)
            errors.append(percent(format, iter([make((2048, 2048))])))
        if folder:
            errors.append(percent(format, linears(folder)))
        torch.manual_seed(0)
        weight = torch.randn(2048, 2048).bfloat16().to(device)
        codes = format.quantize(weight)
        quantise = seconds(lambda f=format, w=weight: f.quantize(w), device)
        dequantise = seconds(lambda c=codes: dequantize(c, torch.bfloat16), device)
        rates = [weight.numel() / s / 1e6 for s in (quantise, dequantise)]
        row = [f"{format.bits:.3g}", *(f"{e:.2f}" for e in errors), *(f"{r:.0f}" for r in rates)]
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

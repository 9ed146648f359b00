"""Speed of quantising: `python benchmarks/quantise.py [--gigabytes 28] [--shard 5] [--scratch FOLDER]`.

First from memory, on a GPU: GB a second of bf16 weights, for matrices of a 14B model and each rule of scales, global
scale and check for NaN included; the last column names those whose first rows have not the bits that the CPU gives.
Then, with --gigabytes, from disk to disk: a synthetic folder of that size in shards of --shard GB, with the layers of a
14B model, through formats/writing.py's quantize_checkpoint, the most memory that the process took beyond what it had
before, and how fast this machine reads, hashes and writes a shard when it does nothing else: reading and hashing
overlap with quantising, writing does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qerl.display import ByteProgress
from qerl.formats.codes import INT4, MXFP4, NF4, NVFP4
from qerl.formats.writing import quantize_checkpoint

HIDDEN, INTERMEDIATE = 5120, 13824  # Qwen2.5-14B
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


COLUMNS: dict[str, Any] = {
    "nvfp4, amax": NVFP4("amax"),
    "nvfp4, sweep": NVFP4(),
    "nvfp4, weighted": NVFP4(),
    "mxfp4, sweep": MXFP4(),
    "mxfp4, weighted": MXFP4(),
    "nf4": NF4(double_quant=False),  # with it, the mean of the maxima is a sum in the device's order
    "int4, sweep": INT4(),
}


def from_memory() -> None:
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}: GB/s of bf16 weights, quantised from memory")
    print(f"| matrix | {' | '.join(COLUMNS)} | bits unlike the CPU's |\n|{'---|' * (len(COLUMNS) + 2)}")
    for n, k in ((INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (1024, HIDDEN)):
        weight = torch.randn(n, k, device=device).mul_(0.02).bfloat16()
        importance = torch.rand(k, device=device)
        rates, unlike = [], []
        for label, format in COLUMNS.items():
            how = {"importance": importance} if label.endswith("weighted") else {}
            best = float("inf")
            for _ in range(6):
                torch.cuda.synchronize()
                start = time.perf_counter()
                shared = format.share([weight], ["weight"])
                codes: Any = format.quantize(weight, shared=shared, **how)
                torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
            rates.append(f"{weight.nbytes / best / 1e9:.1f}")
            there = {key: vector.cpu() for key, vector in how.items()}
            on_cpu: Any = format.quantize(weight[:128].cpu(), shared=None if shared is None else shared.cpu(), **there)
            pairs = [(a[: len(b)].cpu(), b) for a, b in zip(codes, on_cpu, strict=True) if b is not None]
            if not all(torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                unlike.append(label)
        print(f"| {n} x {k} | {' | '.join(rates)} | {'; '.join(unlike) or 'none'} |", flush=True)


def write_folder(folder: Path, gigabytes: float, shard_gigabytes: float) -> int:
    """Layers of random weights, as many as fit, in shards; how many."""
    layer = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in LINEARS.items()}
    num_layers = max(1, round(gigabytes * 1e9 / sum(t.nbytes for t in layer.values())))
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    held, number = 0, 0

    def save() -> None:
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for i in range(num_layers):
        for name, tensor in layer.items():
            if held + tensor.nbytes > shard_gigabytes * 1e9:
                save()
                held, number = 0, number + 1
            tensors[f"model.layers.{i}.{name}.weight"] = tensor.clone()
            held += tensor.nbytes
    save()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return num_layers


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def alone(shard: Path) -> None:
    """Rates of what a shard goes through, one after the other, its bytes out of the page cache before."""
    size = shard.stat().st_size / 1e9
    with shard.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while file.read(1 << 23):
            pass
        read = time.perf_counter()
        file.seek(0)
        hashlib.file_digest(file, "sha256")
        hashed = time.perf_counter()
        file.seek(0)
        with (shard.parent / "copy").open("wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 23)
            copy.flush()
            os.fsync(copy.fileno())
        written = time.perf_counter()
    rates = (size / (read - start), size / (hashed - read), size / (written - hashed))
    print("alone: read {:.2f}, SHA-256 {:.2f}, write {:.2f} GB/s".format(*rates))


def from_disk(gigabytes: float, shard: float, scratch: Path) -> None:
    source, target = scratch / "source", scratch / "target"
    num_layers = write_folder(source, gigabytes, shard)
    if (pid := os.fork()) == 0:  # another process, so that what the folder's making took does not count
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.ones(1, device=device)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        before, start = resident("VmRSS"), time.perf_counter()
        report = quantize_checkpoint(source, target, device=device, progress=ByteProgress(sys.stderr))
        seconds, most = time.perf_counter() - start, resident("VmHWM") - before
        largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
        print(
            f"{num_layers} layers, {report['source_bytes'] / 1e9:.2f} GB -> {report['target_bytes'] / 1e9:.2f} GB in "
            f"{seconds:.1f} s on {device}: {report['source_bytes'] / seconds / 1e9:.2f} GB/s; host memory at most "
            f"{most / 1e9:.2f} GB more, {most / largest:.2f} of a shard"
        )
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit("the process that quantised has failed")
    alone(max(source.glob("*.safetensors"), key=lambda file: file.stat().st_size))
    shutil.rmtree(scratch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0)
    parser.add_argument("--shard", type=float, default=5)
    parser.add_argument("--scratch", type=Path, default=Path("quantise-scratch"))
    options = parser.parse_args()
    if options.gigabytes:
        from_disk(options.gigabytes, options.shard, options.scratch)  # before CUDA is touched, since it forks
    if torch.cuda.is_available():
        from_memory()


if __name__ == "__main__":
    main()

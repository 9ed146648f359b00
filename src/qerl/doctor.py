"""What this machine has, and which paths a run will take on it. What `qerl doctor` prints."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata

import torch

from qerl import __version__

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "triton", "trl", "compressed-tensors", "bitsandbytes")


def report() -> list[tuple[str, str]]:
    """Pairs of a heading and what was found."""
    rows = [
        ("qerl", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("libraries", ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _version(name)))),
        ("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used"),
        ("disk here", f"{shutil.disk_usage('.').free / 1e9:.0f} GB free"),
    ]
    if not torch.cuda.is_available():
        return [
            *rows,
            ("gpu", "none that torch can see"),
            ("products", "reference (PyTorch) on the CPU; runs are small here"),
        ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append(
            (
                f"gpu {index}",
                f"{properties.name}, sm_{properties.major}{properties.minor}, "
                f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
            )
        )
    path = (
        "NVFP4 dequantised by a Triton kernel, then cuBLAS"
        if _version("triton")
        else "reference (PyTorch): triton is missing"
    )
    return [*rows, ("products", path)]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

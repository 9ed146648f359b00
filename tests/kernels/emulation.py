"""Kernels of nvrtc.py that run their own source on this machine, through a C++ compiler: on_cpu/emulation.cpp."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from qerl.kernels.nvrtc import KERNELS

FOLDER = Path(__file__).with_name("on_cpu")
TYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}


class EmulatedKernel:
    """As nvrtc.Kernel; it holds on to nothing between launches."""

    def __init__(self, library: ctypes.CDLL, name: str, signature: str, backwards: bool, cluster: int = 1) -> None:
        self.run, self.signature, self.backwards, self.cluster = library[f"run_{name}"], signature, backwards, cluster
        self.take_brought_near = library["take_brought_near"]

    def launch(self, grid, block, shared, args, *, overlap=False) -> None:
        values = [
            TYPES[letter](a.data_ptr() if isinstance(a, torch.Tensor) else a)
            for letter, a in zip(self.signature, args, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        assert shared <= 227 * 1024 and grid[0] % self.cluster == 0
        status = self.run(grid[0], block, self.cluster, self.backwards, pointers)
        assert status == 0, "threads wait for each other for ever"
        tensors = [(a.data_ptr(), a.data_ptr() + a.nbytes) for a in args if isinstance(a, torch.Tensor)]
        at, size = ctypes.c_void_p(), ctypes.c_uint32()
        while self.take_brought_near(ctypes.byref(at), ctypes.byref(size)):
            first, end = at.value or 0, (at.value or 0) + size.value
            assert first and size.value and not any(start <= first < stop < end for start, stop in tensors), "foreign"


def emulation(source: Path, defines: Mapping[str, int | str], exports: str, dynamic: str) -> ctypes.CDLL:
    """A variant of a source as a library. `exports`: RUN(name) of its kernels; `dynamic`: its dynamic shared memory."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return _compile(source, tuple(defines.items()), exports, dynamic)


@cache
def _compile(source: Path, defines: tuple[tuple[str, int | str], ...], exports: str, dynamic: str) -> ctypes.CDLL:
    folder = Path(mkdtemp())
    (folder / source.name).write_text(source.read_text().replace("extern __shared__", "EXTERN_SHARED"))
    macros = [*defines, ("SOURCE", f'"{source.name}"'), ("EXPORTS", exports), ("DYNAMIC", dynamic)]
    options = [f"-D{name}={value}" for name, value in macros]
    options += [f"-I{path}" for path in (folder, FOLDER, KERNELS)]
    command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++17", "-fno-strict-aliasing", "-w", *options]
    subprocess.run([*command, str(FOLDER / "emulation.cpp"), "-o", str(folder / "emulation.so")], check=True)
    library = ctypes.CDLL(str(folder / "emulation.so"))
    shutil.rmtree(folder)
    return library

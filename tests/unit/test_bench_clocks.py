"""benchmarks/engine/clocks.py without a GPU: the clocks find their places and compile, and records become launches."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "engine"))
import clocks  # pyright: ignore[reportMissingImports]

from qerl.kernels import nvrtc
from qerl.kernels.w4a16 import portable, prepare


def test_the_sources_with_clocks_compile(tmp_path: Path) -> None:
    copies = clocks.instrumented(0x7F00_0000_0000, tmp_path)
    variants = [v for v in portable.VARIANTS if v.tokens == 8]
    programs = [(portable.SOURCE, "w4a16", v.defines("e4m3")) for v in variants]
    programs += [
        (prepare.SOURCE, "w4a16_prepare", prepare.shape_of(8, 8, slices, 1024, 132).defines(8, slices))
        for slices in (0, 2)
    ]
    for source, name, defines in programs:
        assert nvrtc.compile(copies[source], defines, "sm_90a") != nvrtc.compile(source, defines, "sm_90a")
        assert nvrtc.signature_of(copies[source], name) == nvrtc.signature_of(source, name)


def record(kind: int, grid: int, k: int, number: int, *times: int) -> list[int]:
    return [*times, grid << 32 | k, 2 * number + kind]


def test_records_become_launches_and_a_table() -> None:
    """Two layers of one product of 3 blocks, the kernel of u before it, and one record left of an older launch."""
    start = 10**12
    records = [record(0, 3, 64, 0, *(start - 200_000 + i for i in range(6)))]
    for layer, x in enumerate((start, start + 100_000)):
        for block in range(3):
            at = x + 1000 * block
            has_u = 0 if block else at + 7000
            records.append(record(0, 3, 64, 9, at - 5000, at, at + 6000, at + 6500, has_u, at + 8000 + layer * 2000))
        records += [record(1, 2, 64, 9, x - 9000, x - 1000, x + 2000, 0, 0, x + 3000)] * 2
    found = clocks.launches(np.array([*records[::-1], [0] * 8]))
    assert [(x.is_product, x.grid, x.k, len(x.times)) for x in found] == [(False, 2, 64, 2), (True, 3, 64, 3)] * 2
    lines = [line.split() for line in clocks.table(found)]
    assert " ".join(lines[0]) == "3 blocks, k 64: 1 launches, x -> 100.0"
    assert lines[1:] == [
        ["starts", "-5.0", "-4.8", "-4.0", "-3.2", "-3.0"],
        ["sees", "x", "0.0", "0.2", "1.0", "1.8", "2.0"],
        ["multiplied", "6.0", "6.2", "7.0", "7.8", "8.0"],
        ["has", "sums", "6.5", "6.7", "7.5", "8.3", "8.5"],
        ["has", "u", "7.0", "7.0", "7.0", "7.0", "7.0"],
        ["ends", "8.0", "8.2", "9.0", "9.8", "10.0"],
        ["u", "starts", "-9.0", "-9.0", "-9.0", "-9.0", "-9.0"],
        ["u", "sees", "x", "-1.0", "-1.0", "-1.0", "-1.0", "-1.0"],
        ["u", "multiplied", "2.0", "2.0", "2.0", "2.0", "2.0"],
        ["u", "ends", "3.0", "3.0", "3.0", "3.0", "3.0"],
    ]

"""benchmarks/kernels without a GPU: shapes and floors, records and table, and that what is wrong is never timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))
import bench_w4a16 as bench  # pyright: ignore[reportMissingImports]
import harness  # pyright: ignore[reportMissingImports]
import peers  # pyright: ignore[reportMissingImports]

SMALL = bench.Product("qkv", (128, 64, 64), 96)  # parts that do not fill a tile, K that does not either


@pytest.mark.parametrize(
    ("model", "m", "us"),
    [
        ("7B", 1, 31.2),
        ("7B", 64, 37.8),
        ("7B", 1024, 604.1),
        ("32B", 8, 65.3),
        ("32B", 128, 158.0),
        ("32B", 256, 316.0),
    ],
)
def test_floor_is_the_limit_of_a_layer(model: str, m: int, us: float) -> None:
    assert bench.floor_us(bench.MODELS[model], m) == pytest.approx(us, abs=0.06)


def test_shapes_are_those_of_qwen2_5() -> None:
    shapes = {name: [(p.rows, p.columns) for p in products] for name, products in bench.MODELS.items()}
    assert shapes == {
        "0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
        "3B": [(2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)],
        "7B": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
        "14B": [(7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)],
        "32B": [(7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648)],
    }


def test_copies_outgrow_the_cache() -> None:
    assert harness.copies_for(7.2e6) == 35
    assert harness.copies_for(1e9) == 2
    assert [harness.passes_for(n) for n in (2, 3, 8, 35)] == [4, 3, 1, 1]


def test_record_has_what_the_results_promise() -> None:
    line = bench.record(
        "32B",
        8,
        "products",
        {"qerl": 80.0, "cublas": 260.0, "humming": None},
        {"qerl": 1.7e-3, "cublas": 1.6e-3, "humming": float("nan")},
        run="r",
    )
    assert json.loads(json.dumps(line, allow_nan=False)) == {
        "bench": "w4a16_layer",
        "model": "32B",
        "M": 8,
        "measure": "products",
        "us": 80.0,
        "cublas_us": 260.0,
        "humming_us": None,
        "speedup_vs_cublas": 3.25,
        "speedup_vs_humming": None,
        "floor_us": 65.3,
        "rel_err": {"qerl": 1.7e-3, "cublas": 1.6e-3, "humming": "nan"},
        "run": "r",
    }


def line(model: str, m: int, own: float | None, cublas: float, humming: float, error: float = 1.7e-3) -> dict[str, Any]:
    times = {"qerl": own, "cublas": cublas, "humming": humming}
    return bench.record(model, m, "products", times, {"qerl": error})


def test_table_judges_by_the_bars() -> None:
    rows = bench.table(
        [
            line("32B", 1, 80.0, 272.0, 131.0),  # 3.4x, exactly the bar
            line("32B", 8, 82.0, 259.0, 80.0),  # 3.16x of 3.2x, slower than humming
            line("32B", 512, 900.0, 800.0, 850.0, error=2.1e-3),  # 0.89x of 0.92x; no bar against humming from 512 on
            line("3B", 1, None, 50.0, 40.0),  # no time, no bars
        ]
    ).splitlines()
    assert [(r.count("ok"), r.count("MISS")) for r in rows if r[:5].strip().isdigit()] == [
        (2, 0),
        (0, 2),
        (0, 1),
        (0, 0),
    ]
    assert "2.1e-03!" in next(r for r in rows if r.startswith("  512"))
    assert not any("!" in r for r in rows if not r.startswith("  512"))
    assert sum(r.startswith("Qwen2.5-") for r in rows) == 2


def test_table_shows_what_an_adapter_costs() -> None:
    def with_lora(m: int, us: float) -> dict[str, Any]:
        return bench.record("7B", m, "products", {"qerl": 50.0, "cublas": 150.0, "qerl+lora": us}, {"qerl": 1e-3})

    within, above, unjudged = bench.table([with_lora(1, 55.9), with_lora(64, 56.1), with_lora(128, 60.0)]).splitlines()[
        2:
    ]
    assert within.endswith("+11.8%     12% ok")
    assert above.endswith("+12.2%   12% MISS")
    assert unjudged.endswith("+20.0%")


def test_health_is_judged_by_the_farthest_time() -> None:
    assert "M = 8: -9.6%" in bench.cublas_health([line("32B", 1, 80, 272, 1), line("32B", 8, 80, 234.2, 1)])
    assert "NOT those" not in bench.cublas_health([line("32B", 8, 80, 234.2, 1)])
    assert "NOT those of a healthy card" in bench.cublas_health([line("32B", 1, 80, 300, 1), line("7B", 1, 50, 134, 1)])
    assert "not known" in bench.cublas_health([line("3B", 1, 20, 60, 30)])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_bf16_holds_the_random_weights(fmt: peers.Format) -> None:
    weights = peers.dense(peers.random_parts([64], 96, fmt, torch.Generator().manual_seed(0))[0])
    assert torch.equal(weights, weights.bfloat16().float())
    assert weights.isfinite().all()
    assert weights.unique().numel() > 30


class Half:
    """Leaves rows of the result unwritten."""

    name, bytes_a_weight = "half", 1e8

    def weights(self, parts: Any, copies: int) -> list[Tensor]:
        return [torch.cat([peers.dense(part) for part in parts])] * copies

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        half = x.shape[0] // 2
        out[:half] = x[:half].float() @ weight.T
        return out

    def expected(self, product: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return product


class Broken(Half):
    """Cannot multiply."""

    name = "broken"

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this shape")


class Unready(Half):
    """Cannot even hold the weights."""

    name = "unready"

    def weights(self, parts: Any, copies: int) -> list[Tensor]:
        raise ValueError("refused")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that launch again when they are replayed, into the first result's memory; every replay takes 7 us."""

    class Graph:
        def __init__(self, launch: Any, result: Tensor) -> None:
            self.launch, self.result = launch, result

        def replay(self) -> None:
            self.result.copy_(self.launch())

    def capture(launch: Any) -> harness.Captured:
        result = launch()
        return harness.Captured(Graph(launch, result), result)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(harness, "capture", capture)
    monkeypatch.setattr(harness, "replay_us", lambda graph, replays: 7.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(harness, "COLD_BYTES", 3e4)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_contenders_agree_and_the_wrong_are_not_timed(eager: None, fmt: peers.Format) -> None:
    contenders: list[peers.Peer] = [peers.Cublas(), peers.Qerl(), peers.QerlLora(), Half(), Broken(), Unready()]
    case = bench.Case(SMALL, contenders, fmt, 4, torch.Generator().manual_seed(0))
    results = {peer.name: case.measure(peer, 4, 1) for peer in contenders}
    for name in ("cublas", "qerl", "qerl+lora"):
        assert results[name].rel_err < bench.MAX_ERROR
        assert results[name].problem is None
    assert results["cublas"].us == 7.0 / 8  # two copies of 49 kB, four passes
    assert results["half"] == (None, pytest.approx(float("nan"), nan_ok=True), "wrong: relative error nan")
    assert results["broken"] == (None, None, "RuntimeError: no kernel for this shape")
    assert results["unready"] == (None, None, "weights: ValueError: refused")
    assert bench.layer_us([case, case], peers.Qerl(), 2, 1) == 7.0 / 8


def test_an_adapter_changes_the_expected_result(eager: None) -> None:
    lora = peers.QerlLora()
    case = bench.Case(SMALL, [lora], "nvfp4", 4, torch.Generator().manual_seed(0))
    expected = lora.expected(case.exact, case.x, case.weights[lora.name][0])
    assert 0.1 < harness.relative_error(expected, case.exact) < 0.4


def test_copies_share_no_memory() -> None:
    parts = peers.random_parts([128, 128], 64, "nvfp4", torch.Generator().manual_seed(0))
    tiles = [weight.tiles for weight in peers.Qerl().weights(parts, 3)]
    assert len({t.data_ptr() for t in tiles}) == 3
    assert all(torch.equal(t, tiles[0]) for t in tiles)


def test_results_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "results" / "gpu.jsonl"
    harness.write([{"M": 1}], str(file), "NVIDIA H200")
    harness.write([{"M": 8}, {"M": 16}], str(file), "NVIDIA H200")
    assert [json.loads(text)["M"] for text in file.read_text().splitlines()] == [1, 8, 16]
    assert harness.results_file("NVIDIA H200").name == "nvidia-h200.jsonl"

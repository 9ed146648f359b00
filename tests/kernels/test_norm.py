"""Residual addition and RMSNorm: the reference against the equation, the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from triton_runs import CAPABILITIES, DEVICES, compile_launches, needs_triton, outer_run, run_interpreted

from qerl.kernels.announcement import Announcement
from qerl.kernels.norm import add_rms_norm_
from qerl.kernels.norm.reference import add_rms_norm_reference_, rms_norm_grad_reference, rms_norm_reference

EPS = 1e-6
GAINS = ["vector", "shared", "per token", "per slot", "indexed"]


def problem(tokens: int, h: int, gains: str, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16):
    """x, delta, gain, index; delta has rows that are far apart."""
    generator = torch.Generator().manual_seed(tokens)
    x = 5 * torch.randn(tokens, h, generator=generator)
    delta = torch.randn(tokens, 2 * h, generator=generator).to(device, dtype)[:, :h]
    gain = 1 + 0.1 * torch.randn(max(tokens, 4), 3, h, generator=generator).to(device)
    index = torch.randint(0, 4, (tokens,), generator=generator).to(device)
    gain = {
        "vector": gain[0, 0],
        "shared": gain[:1, 0],
        "per token": gain[:tokens, 0].contiguous(),
        "per slot": gain[:tokens].transpose(0, 1)[1],  # one site of slots' rows, as the runner has them
        "indexed": gain[:4, 0],
    }[gains]
    return x.to(device, dtype), delta, gain, index if gains == "indexed" else None


@pytest.mark.parametrize("gains", GAINS)
def test_the_reference_is_the_equation(gains):
    x, delta, gain, index = problem(7, 96, gains, dtype=torch.float32)
    total = x + delta
    rows = gain.view(-1, 96).double()
    of_token = rows[index] if index is not None else rows if len(rows) == 7 else rows.expand(7, 96)
    y = add_rms_norm_(x, delta, gain, EPS, index)
    assert torch.equal(x, total)
    expected = of_token * total.double() / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(y, expected.float())


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize("tokens, h", [(1, 64), (9, 896), (3, 3584)])
def test_the_kernel_adds_exactly_and_norms_but_for_rounding(tokens, h, gains, device):
    """The mean is summed in another order, so that now and then a number is rounded to its neighbour."""
    from qerl.kernels.norm.add_rms_norm import add_rms_norm_bf16_

    x, delta, gain, index = problem(tokens, h, gains, device=device)
    for added in (delta, None):
        expected_x = x.clone()
        expected = add_rms_norm_reference_(expected_x, added, gain, EPS, index)
        y = add_rms_norm_bf16_(x, added, gain, EPS, index)
        assert torch.equal(x, expected_x)
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=0)
        assert (y != expected).float().mean() < 0.01


@pytest.mark.parametrize("gains", ["vector", "per token"])
def test_the_reference_gradient_is_autograds(gains):
    x, dy, gain, _ = problem(7, 96, gains, dtype=torch.float32)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(rms_norm_reference(x, gain, EPS), x, dy)
    torch.testing.assert_close(rms_norm_grad_reference(dy, x, gain, EPS), expected)


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize("tokens, h", [(1, 64), (3, 896)])
def test_the_gradients_kernel_is_the_reference_but_for_rounding(tokens, h, gains, device):
    from qerl.kernels.norm.rms_norm_grad import rms_norm_grad_bf16

    x, dy, gain, index = problem(tokens, h, gains, device=device)
    expected = rms_norm_grad_reference(dy, x, gain if index is None else gain[index], EPS)
    dx = rms_norm_grad_bf16(dy, x, gain, EPS, index)
    torch.testing.assert_close(dx, expected, rtol=2**-7, atol=1e-5)
    assert (dx != expected).float().mean() < 0.01


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_gives_a_token_the_same_bits_in_any_company(device):
    from qerl.kernels.norm.add_rms_norm import add_rms_norm_bf16_

    x, delta, gain, index = problem(9, 896, "indexed", device=device)
    y = add_rms_norm_bf16_(x.clone(), delta, gain, EPS, index)
    for i in range(9):
        one = slice(i, i + 1)
        assert torch.equal(add_rms_norm_bf16_(x[one].clone(), delta[one], gain, EPS, index[one]), y[one])


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_each_program_announces_its_part(device):
    from qerl.kernels.norm.add_rms_norm import add_rms_norm_bf16_

    x, delta, gain, _ = problem(5, 896, "shared", device=device)
    announcement = Announcement(torch.zeros(2, dtype=torch.int32, device=device))
    y = add_rms_norm_bf16_(x.clone(), delta, gain, EPS, announcement=announcement)
    assert torch.equal(y, add_rms_norm_bf16_(x, delta, gain, EPS))
    assert announcement.publishers == 5 and announcement.counter.tolist() == [5, 0]


@needs_triton
@outer_run
def test_in_tritons_interpreter():
    run_interpreted(__file__)


@needs_triton
@outer_run
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("gains", ["shared", "per slot", "indexed"])
def test_the_kernel_compiles(gains, capability, monkeypatch):
    from qerl.kernels.norm.add_rms_norm import add_rms_norm_bf16_

    x, delta, gain, index = problem(8, 3584, gains)
    from qerl.kernels.norm.rms_norm_grad import rms_norm_grad_bf16

    def calls() -> None:
        add_rms_norm_bf16_(x, delta, gain, EPS, index)
        rms_norm_grad_bf16(delta, x, gain, EPS, index)

    forward, backward = compile_launches(capability, monkeypatch, calls, reads_ahead=["_add_rms_norm_kernel"])
    assert "st.global.v4" in forward.asm["ptx"] and "st.global.v4" in backward.asm["ptx"]


@needs_triton
@outer_run
def test_behind_a_new_gain_nothing_overlaps(monkeypatch):
    """What the kernel right before has written is sure to be there only behind a wait; the gain is read ahead of it."""
    from qerl.kernels.norm import add_rms_norm

    launches: list[dict[str, object]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **options: launches.append(options)

    monkeypatch.setattr(add_rms_norm, "_add_rms_norm_kernel", Recorder())
    monkeypatch.setattr(add_rms_norm, "overlaps", lambda device: {"OVERLAP": True, "launch_pdl": True})
    x, delta, gain, _ = problem(8, 64, "shared")
    for new_gain in (False, True):
        add_rms_norm.add_rms_norm_bf16_(x, delta, gain, EPS, new_gain=new_gain)
    assert [(of["OVERLAP"], of.get("launch_pdl", False)) for of in launches] == [(True, True), (False, False)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_in_a_graph_the_kernel_waits_for_a_copy():
    """The launch may overlap what is before it; that is no kernel here, so it has to be over."""
    sources = torch.randn(20, 2048, 4096, device="cuda").bfloat16()
    gain, x, graph = torch.ones(4096, device="cuda"), torch.zeros_like(sources[0]), torch.cuda.CUDAGraph()
    expected = [add_rms_norm_(source, None, gain, EPS) for source in sources]
    with torch.cuda.graph(graph):
        found = [add_rms_norm_(x.copy_(source), None, gain, EPS) for source in sources]  # 16 MB: a node of its own
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

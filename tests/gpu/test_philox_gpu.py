"""Philox on a GPU: the same integers as on a CPU, nearly the same floats, and capturable in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from qerl.philox import fold, gumbel, normal, philox4x32, uniform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

KEYS = torch.tensor([fold(i) for i in range(8)])
COUNTERS = torch.arange(8) << 31


def test_integers_equal_the_cpus():
    words = (torch.arange(1000), torch.tensor(3), torch.tensor(0xFFFFFFFF), torch.tensor(7))
    here = philox4x32(words, (0x9E3779B9, 0xFFFFFFFF))
    there = philox4x32(tuple(w.cuda() for w in words), (0x9E3779B9, 0xFFFFFFFF))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


def test_uniform_is_the_same_and_the_others_nearly():
    on_gpu = (KEYS.cuda(), COUNTERS.cuda(), 4099)
    assert torch.equal(uniform(*on_gpu).cpu(), uniform(KEYS, COUNTERS, 4099))
    for draw in (normal, gumbel):
        torch.testing.assert_close(draw(*on_gpu).cpu(), draw(KEYS, COUNTERS, 4099), rtol=1e-5, atol=2e-6)


def test_a_cuda_graph_reads_keys_and_counters_from_device_tensors():
    keys, counters = KEYS.cuda(), COUNTERS.cuda()
    gumbel(keys, counters, 128)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = gumbel(keys, counters, 128)
    counters += 1
    graph.replay()
    assert torch.equal(values, gumbel(keys, counters, 128))

"""Philox against published known answers; keys that do not collide; distributions and layout of what is made of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.philox import fold, gumbel, normal, philox4x32, uniform

UINT32 = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # philox4x32, 10 rounds, of Random123's kat_vectors
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((UINT32,) * 4, (UINT32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
@pytest.mark.parametrize("key_as_tensor", [False, True])
def test_known_answers(counter, key, expected, key_as_tensor):
    words = tuple(torch.full((3, 5), c) for c in counter)
    key = tuple(torch.full((3, 1), k) for k in key) if key_as_tensor else key
    for lane, value in zip(philox4x32(words, key), expected, strict=True):
        assert lane.dtype == torch.int64
        assert (lane == value).all()


def test_the_inputs_are_not_changed():
    words = tuple(torch.arange(4) + 10 * i for i in range(4))
    before = [w.clone() for w in words]
    philox4x32(words, (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(words, before, strict=True))


def python_philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & UINT32, (p0 >> 32) ^ c3 ^ k1, p0 & UINT32
        k0, k1 = (k0 + 0x9E3779B9) & UINT32, (k1 + 0xBB67AE85) & UINT32
    return c0, c1, c2, c3


word = st.integers(0, UINT32)


@settings(max_examples=50, deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_equals_arbitrary_precision_arithmetic(counter, key):
    lanes = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(lane.item() for lane in lanes) == python_philox(counter, key)


def test_uniform_layout_is_the_documented_one():
    key, counter, site, size = fold(7, 8), torch.tensor([3, -5, (9 << 32) | 4]), 11, 6
    values = uniform(key, counter, size, site=site)
    assert values.shape == (3, 6)
    assert values.dtype == torch.float32
    for r, j in itertools.product(range(3), range(size)):
        c = counter[r].item() & 0xFFFFFFFFFFFFFFFF
        x = python_philox((j // 4, site, c & UINT32, c >> 32), (key & UINT32, key >> 32 & UINT32))[j % 4]
        assert values[r, j].item() == ((x >> 9) + 0.5) * 2.0**-23


@pytest.mark.parametrize("draw", [uniform, normal, gumbel])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 33])
def test_rows_and_prefixes_do_not_depend_on_the_call(draw, size):
    keys, counters = torch.tensor([fold(1), fold(2), fold(1)]), torch.tensor([0, 5, 1])
    whole = draw(keys, counters, 40, site=2)
    for r in range(3):
        row = draw(keys[r : r + 1], counters[r : r + 1], size, site=2)
        assert torch.equal(row[0], whole[r, :size])
    assert torch.equal(draw(fold(1), counters[[0, 2]], 40, site=2), whole[[0, 2]])


@pytest.mark.parametrize("draw", [uniform, normal, gumbel])
def test_no_rows(draw):
    assert draw(1, torch.empty(0, dtype=torch.int64), 8).shape == (0, 8)


def test_every_part_of_the_address_matters():
    counter, other = torch.tensor([1]), torch.tensor([1 + (1 << 32)])
    rows = [
        normal(1, counter, 64),
        normal(2, counter, 64),
        normal(1 + (1 << 32), counter, 64),
        normal(1, other, 64),
        normal(1, counter + 1, 64),
        normal(1, counter, 64, site=1),
    ]
    for a, b in itertools.combinations(rows, 2):
        assert not (a == b).any()


def test_fold_is_splitmix64():
    # SplitMix64 seeded with 0 begins 0xE220A8397B1DCDAF; with 1234567 it begins 6457827717110365317.
    assert fold(-1) & 0xFFFFFFFFFFFFFFFF == 0xE220A8397B1DCDAF  # one part: h starts at 1
    assert fold(1234566) == 6457827717110365317


def test_fold_gives_distinct_keys_that_fit_an_int64_tensor():
    tuples = list(itertools.product(range(3), range(10), range(12), range(8)))
    keys = [fold(*t) for t in tuples]
    assert len(set(keys)) == len(keys)
    assert torch.tensor(keys, dtype=torch.int64).tolist() == keys
    assert len({fold(), fold(0), fold(0, 0), fold(0, 0, 0), fold(0, 1), fold(1, 0)}) == 6
    with pytest.raises(ValueError, match="64 bits"):
        fold(1 << 64)


def test_keys_that_differ_in_one_bit_give_unrelated_bits():
    base = fold(0, 0)
    flips = torch.tensor([fold(0, 1 << b) for b in range(40)])
    distance = torch.tensor([bin((k ^ base) & 0xFFFFFFFFFFFFFFFF).count("1") for k in flips.tolist()])
    assert 28 < distance.double().mean() < 36


def test_uniform_is_inside_the_open_interval_and_flat():
    u = uniform(fold(3), torch.arange(64), 4096).double().flatten()
    assert u.min() > 0
    assert u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n)
    histogram = torch.histc(u, 64, 0, 1)
    chi_squared = ((histogram - n / 64) ** 2 / (n / 64)).sum()
    assert 63 - 5 * math.sqrt(126) < chi_squared < 63 + 5 * math.sqrt(126)


def test_normal_moments_and_tails():
    z = normal(fold(4), torch.arange(64), 4096).double().flatten()
    n = z.numel()
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.std() - 1) < 5 / math.sqrt(2 * n)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for limit in (1.0, 2.0, 3.0):
        p = math.erfc(limit / math.sqrt(2))
        assert abs((z.abs() > limit).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_the_two_halves_of_box_muller_are_uncorrelated():
    z = normal(fold(5), torch.arange(64), 4096).double().view(-1, 4)
    correlation = torch.corrcoef(z.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(len(z))
    assert (torch.corrcoef((z**2).T) - torch.eye(4)).abs().max() < 5 / math.sqrt(len(z))


def test_gumbel_argmax_samples_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    n = 40_000
    choice = (logits + gumbel(fold(6), torch.arange(n), 5)).argmax(-1)
    share = torch.bincount(choice, minlength=5).double() / n
    p = logits.double().softmax(-1)
    assert ((share - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()


def test_gumbel_is_finite_at_both_ends_of_the_integers(monkeypatch):
    ends = tuple(torch.tensor([[0, UINT32]]) for _ in range(4))
    monkeypatch.setattr("qerl.philox._bits", lambda *_: ends)
    values = gumbel(0, torch.zeros(1, dtype=torch.int64), 8)
    assert values.isfinite().all()
    assert values[0, 0].item() == pytest.approx(-math.log(2.0**-33), abs=1e-5)
    assert -3 < values.min() < -2.8

"""Philox4x32-10: random numbers that are a pure function of a key and a counter.

Nothing is stored and nothing depends on order: the engine, the trainer, another rank or a resumed run computes the same
numbers from the same key. The integers are the same on every device; the floats made of them may differ in the last
bit where `log`, `cos` and `sin` do.

Where a number comes from. Value j of row r is lane j % 4 of

    philox4x32(counter = (j // 4, site, low32(counter[r]), high32(counter[r])), key = (low32(key[r]), high32(key[r])))

so two rows share numbers only if key, counter and site are all equal. Noise uses key = fold(seed, step, ...), site =
the norm's number, counter = the stream; sampling uses key = the completion's seed, counter = the token's position.

    uniform   u = ((x >> 9) + 0.5) * 2^-23                        23 bits, exact in fp32, never 0 or 1
    normal    Box-Muller: sqrt(-2 ln u0) * (cos, sin)(2 pi u1)    lanes 0, 1 give two normals, lanes 2, 3 the next two
    gumbel    -ln(-ln(1 - v)), v = (x + 0.5) * 2^-32              see `gumbel` for why it needs all 32 bits

All functions are single vectorised calls over rows, with no transfer between host and device, so they can be captured
in a CUDA graph. A uint32 is held in an int64, because torch has no arithmetic on unsigned integers: temporary memory
is about 12 bytes a value.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (constants, and known answers
in Random123). `fold` is SplitMix64's finaliser: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

# Philox4x32's multipliers and its key increments (the golden ratio and sqrt(3) - 1, as 32-bit fractions).
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

# SplitMix64's increment (the golden ratio as a 64-bit fraction) and multipliers.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_0, _MIX_1 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor | int, Tensor | int]) -> Words:
    """Four random uint32 for every counter.

    counter: four int64 tensors of uint32 values, of shapes that broadcast; key: two uint32, each a number or a tensor
    that broadcasts against the counter's shape. Returns four int64 tensors of the common shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two uint32 wraps into int64's sign bit; shift and mask give its high word back.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> 32).bitwise_and_(_MASK32) ^ c1 ^ k0
        c2 = (product_0 >> 32).bitwise_and_(_MASK32) ^ c3 ^ k1
        c1, c3 = product_1.bitwise_and_(_MASK32), product_0.bitwise_and_(_MASK32)
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def fold(*parts: int) -> int:
    """One 64-bit key from several numbers, such as (seed, step, prompt, sample).

    h = mix(h + golden + part) over the parts, from h = number of parts; mix is SplitMix64's finaliser, a bijection of
    64 bits. So tuples of one length that differ in a single part never share a key; others do with probability 2^-64.
    Parts lie in [-2^63, 2^64). The key comes as a signed number, in [-2^63, 2^63), so that it fits an int64 tensor.
    """
    h = len(parts)
    for part in parts:
        if not -(1 << 63) <= part < 1 << 64:
            raise ValueError(f"fold: {part} does not fit 64 bits")
        h = _mix64((h + _GOLDEN + part) & _MASK64)
    return h - (1 << 64) if h >> 63 else h


def _mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_0) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX_1) & _MASK64
    return x ^ (x >> 31)


def uniform(
    key: Int64[Tensor, " rows"] | int, counter: Int64[Tensor, " rows"], size: int, *, site: int = 0
) -> Float32[Tensor, "rows size"]:
    """Uniform numbers in (0, 1): the centres of 2^23 cells, so neither 0 nor 1 occurs and both ends are alike."""
    lanes = _bits(key, counter, size, site)
    return _interleave([_unit(lane) for lane in lanes], size)


def normal(
    key: Int64[Tensor, " rows"] | int,
    counter: Int64[Tensor, " rows"],
    size: int,
    *,
    site: Int64[Tensor, " rows"] | int = 0,
) -> Float32[Tensor, "rows size"]:
    """Standard normal numbers by Box-Muller in fp32; |z| <= sqrt(48 ln 2) = 5.77."""
    u0, u1, u2, u3 = (_unit(lane) for lane in _bits(key, counter, size, site))
    lanes: list[Tensor] = []
    for radius, angle in ((u0, u1), (u2, u3)):
        radius = radius.log_().mul_(-2.0).sqrt_()
        angle = angle.mul_(2.0 * math.pi)
        lanes += [torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)]
    return _interleave(lanes, size)


def gumbel(
    key: Int64[Tensor, " rows"] | int, counter: Int64[Tensor, " rows"], size: int, *, site: int = 0
) -> Float32[Tensor, "rows size"]:
    """Gumbel(0, 1) numbers: argmax(logits + gumbel) is a sample of softmax(logits).

    The winner of V candidates has v near 1/V, where a 23-bit grid is coarse: at V = 150 000 it has some 50 cells, so
    ties would be common. 32 bits, and log1p, which keeps small v exact, give 28 000. Values lie in [-2.9, 22.9].
    """
    lanes: list[Tensor] = []
    for lane in _bits(key, counter, size, site):
        v = lane.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)  # fp32 would round the top to 1
        lanes.append(v.neg_().log1p_().neg_().log_().neg_())
    return _interleave(lanes, size)


def _bits(key: Tensor | int, counter: Tensor, size: int, site: Tensor | int) -> Words:
    """The four lanes, each [rows, ceil(size / 4)]."""
    key = key.unsqueeze(1) if isinstance(key, Tensor) else key
    counter = counter.unsqueeze(1)
    blocks = torch.arange((size + 3) // 4, device=counter.device)
    site_word = site.unsqueeze(1) if isinstance(site, Tensor) else blocks.new_full((), site)
    words = (blocks, site_word, counter & _MASK32, (counter >> 32) & _MASK32)
    return philox4x32(words, (key & _MASK32, (key >> 32) & _MASK32))


def _unit(x: Tensor) -> Tensor:
    return (x >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def _interleave(lanes: list[Tensor], size: int) -> Tensor:
    """[rows, size] whose column j is column j // 4 of lane j % 4."""
    return torch.stack(lanes, dim=-1).flatten(1)[:, :size]

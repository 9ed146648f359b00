import pytest
import torch

from qerl.formats.nvfp4 import quantize
from qerl.kernels.adapter import PackedAdapter, pack_adapter
from qerl.kernels.layout import PackedWeight, pack

ROWS, K = (160, 64, 16), 80


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight() -> PackedWeight:
    return pack([quantize(draw(n, K, seed=n)) for n in ROWS])


def factors(*ranks: int | None, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, float] | None]:
    """One entry a part; the scaling tells them apart."""
    return [
        None if r is None else (draw(r, K, seed=seed + i), draw(n, r, seed=seed + 10 + i), 2.0**-i)
        for i, (n, r) in enumerate(zip(ROWS, ranks, strict=True))
    ]


def same(a: PackedAdapter, b: PackedAdapter) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("largest, padded", [(1, 32), (16, 32), (32, 32), (33, 64), (64, 64)])
def test_factors_lie_where_the_tiles_rows_are_and_zeros_pad(largest, padded):
    w, entries = weight(), factors(largest, None, 8 if largest >= 8 else 1)
    adapter = pack_adapter(w, entries)
    assert adapter.a.shape == (3, padded, 128) and adapter.b.shape == (padded // 16, 512, 16)
    assert adapter.a.dtype == adapter.b.dtype == torch.bfloat16 and adapter.scaling.dtype == torch.float32
    assert adapter.scaling.tolist() == [1.0, 0.0, 0.25]
    a, b = torch.zeros(3, padded, 128), torch.zeros(512, padded)
    for i, (start, entry) in enumerate(zip((0, 256, 384), entries, strict=True)):
        if entry is not None:
            r = len(entry[0])
            a[i, :r, :K], b[start : start + ROWS[i], :r] = entry[0].bfloat16(), entry[1].bfloat16()
    assert torch.equal(adapter.a.float(), a) and torch.equal(adapter.b.float().transpose(0, 1).flatten(1), b)


@pytest.mark.parametrize("ranks", [(32, 32, 8), (4, None, 16), (17, 20, 64), (16, 48, 1)])
def test_copies_bring_new_factors_to_where_the_old_ones_are(ranks):
    w = weight()
    adapter = pack_adapter(w, factors(*ranks))
    addresses = [t.data_ptr() for t in adapter]
    new = factors(*ranks, seed=5)
    for to, of_new in adapter.copies(w, new):
        assert to.shape == of_new.shape
        to.copy_(of_new)
    assert [t.data_ptr() for t in adapter] == addresses and same(adapter, pack_adapter(w, new))


def test_trained_factors_leave_no_graph():
    entries = factors(8, 8, 8)
    for a, b, _ in entries:
        a.requires_grad_(), b.requires_grad_()
    adapter = pack_adapter(weight(), entries)
    assert not any(t.requires_grad for t in adapter)


def test_another_dtype_keeps_the_masters():
    entries = factors(8, None, None)
    adapter = pack_adapter(weight(), entries, torch.float32)
    assert torch.equal(adapter.a[0, :8, :K], entries[0][0])


@pytest.mark.parametrize(
    "entries, message",
    [
        (factors(8, 8, 8)[:2], "2 LoRA entries for a product of 3 parts"),
        (factors(65, 8, 8), r"rank 65 is more than the 64 .* lower lora\.r"),
        ([None, None, None], "leave the adapter out"),
        ([(draw(8, 96), draw(160, 8), 1.0), None, None], r"part 0 .* \[160, 80\]; .* A \[8, 96\] and B \[160, 8\]"),
        ([None, (draw(8, 80), draw(160, 8), 1.0), None], r"part 1 .* \[64, 80\]; .* A \[8, 80\] and B \[160, 8\]"),
        ([None, (draw(8, 80), draw(64, 4), 1.0), None], "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        pack_adapter(weight(), entries)

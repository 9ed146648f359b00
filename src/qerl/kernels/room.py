"""Room behind the rows of an activation: where a product with an adapter writes what the adapter makes of them.

    buffer [t, k + room]        x = buffer[:, :k]: what its producer returns        buffer[:, k:]: anybody's

Training's products are of [x, u] and [W, B] (w4a16/dense.py). Where x has room behind its rows, u goes there; else x
has to be copied first. Norm and SwiGLU make such an x when they are asked to (`room`, set by nn/lora.py where adapters
are); `mark` says so on the tensor that a module returns, and whoever multiplies it asks `room_behind`. Views, copies
and results of x carry no mark, so what is not known to be free is never written. It costs room / k of x's memory.
"""

from __future__ import annotations

from torch import Tensor

_MARK = "_qerl_room"
_STEP = 8


def room_for(ranks: int) -> int:
    """Columns for u of so many ranks: rows go on starting at multiples of 16 bytes."""
    return -(-ranks // _STEP) * _STEP


def empty_with_room(x: Tensor, rows: int, columns: int, room: int) -> Tensor:
    """[rows, columns] of x's dtype and device, uninitialised, with so many columns behind each row."""
    return x.new_empty(rows, columns + room)[:, :columns]


def mark(x: Tensor, room: int) -> Tensor:
    """x, whose producer has been asked for so many columns behind its rows; marked if it has made them (on a GPU)."""
    if room and x.ndim > 1 and x.stride(-2) == x.shape[-1] + room:
        setattr(x, _MARK, room)
    return x


def room_behind(x: Tensor) -> int:
    """Columns behind x's rows that may be written; 0 for what nobody has marked."""
    return getattr(x, _MARK, 0)

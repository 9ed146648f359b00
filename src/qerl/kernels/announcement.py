"""That x is there, told by the kernel that makes it to the product behind it, which has started before.

    announcement = awaited(..)                  None where a product waits for the kernel before it to end
    x = producer(.., announcement)              each of its programs counts when its part of x is written
    y = w4a16(x, weight, .., announcement)      waits for the count, and takes it back

To wait for a kernel's end, and with an adapter for `prepare.cu` to say that it has come, takes about a microsecond
longer, four times a layer. A producer without a kernel for its arguments counts nothing, `publishers` stays 0, and the
product waits for that kernel's end, then. Whoever makes an announcement launches both, one right behind the other, or
forgets the counters (nvrtc.py): the stream's next product would wait for a count that cannot come.

Called by engine/model.py; kept by the producers (kernels/norm, attention, activation) and by kernels/w4a16.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int32
from torch import Tensor


@dataclass
class Announcement:
    """Of one x."""

    counter: Int32[Tensor, " two"]
    """Zeros of the stream, and zeros again when all blocks of the product have seen the count."""
    publishers: int = 0
    """Programs of the producer, each of which counts once; 0: nobody does."""

    def by(self, publishers: int) -> Tensor:
        """The counter, for a producer of so many programs."""
        assert self.publishers == 0, "x has one producer"
        self.publishers = publishers
        return self.counter

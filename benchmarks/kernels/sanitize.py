"""Every variant of the fused products once, on small shapes: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/kernels/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/kernels/sanitize.py

Results are compared with the reference too, so that a tool that changes the timing finds what timing hides.
"""

from __future__ import annotations

import torch

from qerl.formats.nvfp4 import quantize
from qerl.kernels.adapter import pack_adapter
from qerl.kernels.layout import pack
from qerl.kernels.w4a16 import hopper, portable
from qerl.kernels.w4a16.reference import w4a16_reference

ROWS, K, RANK = (200, 72), 336, 32


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = pack([quantize(draw(n, K)) for n in ROWS])
    adapter = pack_adapter(weight, [(draw(RANK, K), draw(n, RANK), 0.5) for n in ROWS])
    weight.to_("cuda")
    adapter = type(adapter)(*(t.cuda() for t in adapter))
    bias = draw(sum(ROWS)).cuda().bfloat16()
    cases = [(portable.w4a16_portable, v) for v in portable.VARIANTS]
    if torch.cuda.get_device_capability() == (9, 0):
        cases += [(hopper.w4a16_hopper, v) for v in hopper.VARIANTS]
    for product, variant in cases:
        x = draw(variant.tokens + 3 if variant.tokens > 8 else 5, K).cuda().bfloat16()
        for extra in (None, adapter):
            y, expected = product(x, weight, bias, extra, variant), w4a16_reference(x, weight, bias, extra)
            torch.cuda.synchronize()
            error = float((y.double() - expected.double()).norm() / expected.double().norm())
            assert error < 4e-3, (product.__name__, variant, error)
    print(f"{2 * len(cases)} products right")


if __name__ == "__main__":
    main()

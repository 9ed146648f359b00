"""dequant from the meaning of the bits alone: brought back to the file's order, decoded by formats/.

Slow; what the fast paths are checked against.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.formats import mxfp4, nvfp4
from qerl.formats.nvfp4 import NVFP4Tensor
from qerl.kernels.layout import PackedWeight, unpack


def dequant_reference(weight: PackedWeight, dtype: torch.dtype) -> Float[Tensor, "n k"]:
    """e2m1 * block_scale of the true rows and columns, parts concatenated."""
    t = unpack(weight)
    if isinstance(t, NVFP4Tensor):
        return nvfp4.dequantize(t._replace(global_scale=torch.ones(1, device=weight.device)), dtype)
    # w / global_scale is another MXFP4 number: exponents are lower by the global scale's. Blocks of zeros may be at 0.
    exponents = t.block_scale.int() - (torch.frexp(weight.row_scale).exponent - 1).unsqueeze(1)
    return mxfp4.dequantize(t._replace(block_scale=exponents.clamp(min=0).to(torch.uint8)), dtype)

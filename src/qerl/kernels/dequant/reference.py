"""dequant from the meaning of the bits alone: brought back to the file's order, decoded by formats/nvfp4.

Slow; what the fast paths are checked against.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qerl.formats.nvfp4 import dequantize
from qerl.kernels.layout import PackedWeight, unpack


def dequant_reference(weight: PackedWeight, dtype: torch.dtype) -> Float[Tensor, "n k"]:
    """e2m1 * block_scale of the true rows and columns, parts concatenated."""
    one = torch.ones(1, device=weight.device)
    return dequantize(unpack(weight)._replace(global_scale=one), dtype)

"""Products with packed weights, and what stands between them, an operation a folder.

Each has its contract in `__init__.py`, which chooses between `reference.py` (PyTorch) and the fast source beside it.
layout.py has the packed weight, adapter.py its LoRA factors, coded.py the formats without a kernel, e4m3.py 8-bit keys
and values; nvrtc.py compiles and launches CUDA C++, overlap.py and numerics.py serve Triton, announcement.py both. How
fast: docs/kernels.md.
"""

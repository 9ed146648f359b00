"""What the bits mean, and the files that hold them. Imports nothing else of the package.

| module | what it is |
|---|---|
| `nvfp4.py` | NVFP4: E2M1 codes, E4M3 block scales, fp32 global scale; quantise and dequantise |
| `mxfp4.py` | MXFP4: E2M1 codes, E8M0 scales for 32 values; quantise and dequantise |
| `checkpoint.py` | transformers folders: bf16, compressed-tensors, ModelOpt; quantise one shard by shard |
"""

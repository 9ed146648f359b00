"""What the bits mean, and the files that hold them. Imports nothing else of the package.

| module | what it is |
|---|---|
| `nvfp4.py` | NVFP4: E2M1 codes, E4M3 block scales, fp32 global scale; quantise and dequantise |
| `mxfp4.py` | MXFP4: E2M1 codes, E8M0 scales for 32 values; quantise and dequantise |
| `e2m1_cuda.py` | quantise of both on a GPU, in one kernel |
| `nf4.py` | NF4: 16 levels of a normal distribution, absmax for 64 values, quantised too or not; as bitsandbytes |
| `int4.py` | INT4: 16 equal steps, bf16 scale and zero point for 32, 64 or 128 values |
| `int4_cuda.py` | quantise of it on a GPU, in one kernel |
| `codes.py` | NVFP4 and MXFP4 behind one interface, and how far codes are from the weights |
| `awq.py` | factors for channels, by their activations |
| `folding.py` | factors that are folded into weights, and the file that keeps them |
| `checkpoint.py` | reading transformers folders: bf16, compressed-tensors, ModelOpt, bitsandbytes |
| `coded_files.py` | NF4 and INT4 layers as such folders hold them, read and written |
| `writing.py` | writing them, packed or dense, shard by shard |
"""

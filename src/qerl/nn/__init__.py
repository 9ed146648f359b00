"""The trained model: a transformers decoder with packed linears, norms that take noise, and PEFT's adapters.

| module | what it is |
|---|---|
| `load.py` | a folder becomes a frozen model: tensor by tensor, quantised while it loads; `open_base` before that |
| `stream.py` | the same for a forward pass, one layer in memory at a time |
| `linear.py` | PackedLinear: y = W x with W in NVFP4, and its gradient, without a dense W kept |
| `rmsnorm.py` | RMSNorm: (w + Z) * x / rms(x); Z is the exploration noise |
| `lora.py` | PEFT adapters on both kinds of linear, and the factors that the engine copies |
| `attention.py` | many sequences in one row: the training forward pass |
| `recompute.py` | decoder layers that recompute their activations in the backward pass |
| `head.py` | hidden states to log-probabilities and entropies, a few tokens' logits at a time |
| `structure.py` | the places in a model: decoder, its layers, head |
"""

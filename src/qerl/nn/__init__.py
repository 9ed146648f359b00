"""The trained model: a transformers decoder with packed linears, norms that take noise, and PEFT's adapters.

| module | what it is |
|---|---|
| `load.py` | a folder becomes a frozen model: tensor by tensor, quantised while it loads; `open_base` before that |
| `architecture.py` | transformers' model without weights, with norms and blocks of ours; which models are refused |
| `stream.py` | a model for a forward pass, one layer in memory at a time |
| `linear.py` | PackedLinear: y = x W^T with W in 4 bits, and its gradient, without a dense W kept |
| `rmsnorm.py` | RMSNorm: (w + Z) * x / rms(x); Z is the exploration noise |
| `lora.py` | PEFT adapters on both kinds of linear, and the factors that the engine copies |
| `attention.py` | many sequences in one row: the training forward pass |
| `self_attention.py`, `mlp.py` | the blocks of Llama's kind, with one operation between their products |
| `recompute.py` | decoder layers that recompute their activations in the backward pass |
| `head.py` | hidden states to log-probabilities and entropies, a few tokens' logits at a time |
| `structure.py` | the places in a model: decoder, its layers, head |
"""

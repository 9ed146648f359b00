"""How far a 4-bit model is from the bf16 weights it stands for: what `qerl inspect` measures.

| module | what it is |
|---|---|
| `weights.py` | SQNR of every linear, from the folders alone |
| `text.py` | KL, agreement and entropies of the next token on given text, by position |

Both go layer by layer: neither model needs to fit into memory. report/inspection.py shows the results.
"""

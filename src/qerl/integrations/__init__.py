"""What other libraries' users take of qerl with one import.

| module | what it is |
|---|---|
| `transformers.py` | NVFP4 and MXFP4 as quantization methods of from_pretrained, with PEFT on top |
| `trl.py` | AQNCallback: adaptive quantization noise for TRL's trainers |
"""

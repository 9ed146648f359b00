"""What other libraries' users take of qerl with one import.

| module | what it is |
|---|---|
| `trl.py` | AQNCallback: adaptive quantization noise for TRL's trainers |
"""

"""Benchmarks that need no files: what `qerl bench` runs.

| module | what it is |
|---|---|
| `step.py` | one whole step of a run: time, bytes and FLOPs of its parts, and its memory under a card's size |
| `endurance.py` | many steps of a small model, of varying lengths: whether memory stays flat |
| `models.py` | Qwen2.5's shapes with random weights, made on the device in the format asked for |
| `meter.py` | seconds and peak bytes of a step's parts; the driver's figure; a memory cap |
"""

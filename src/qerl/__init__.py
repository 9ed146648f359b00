"""qerl: reinforcement learning of large language models on one GPU, over frozen NVFP4 weights."""

__version__ = "0.1.0"

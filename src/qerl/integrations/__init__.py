"""What other libraries' users take of qerl with one import.

| module | what it is |
|---|---|
| `transformers.py` | NVFP4 and MXFP4 as quantization methods of from_pretrained, with PEFT on top |
| `trl/` | AQNCallback: the noise for TRL's trainers, vLLM's too; EngineRollout: the engine as their rollout function |
"""

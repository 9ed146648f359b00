"""`rollout.engine = "vllm"`: vLLM samples, from its own copy of the base, under the trainer's adapters and noise.

| module | what it is |
|---|---|
| `setup.py` | what has to hold before anything is loaded: the library, the folder, the device |
| `engine.py` | `VLLMEngine`: sync, generate, sleep, wake |
| `worker.py` | what runs inside vLLM's worker: adapters from memory, noise on norms; its `--worker-extension-cls` |
| `norms.py` | vLLM's norm modules: clean copy, w + Z, exact restore |
| `adapters.py` | PEFT's factors under the names of vLLM's modules |

Nothing here imports vLLM before an engine is built.
"""

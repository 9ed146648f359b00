"""What TRL's trainers take of qerl; nothing of TRL is patched. docs/trl.md.

| module | what it is |
|---|---|
| `callback.py` | AQNCallback: the noise, where completions come from transformers' generate, or from vLLM |
| `vllm.py` | how it reaches vLLM's norms: in the process, or behind a server |
| `rollout.py` | EngineRollout: completions, with their log-probabilities, from qerl's engine; the noise is its own |
"""

from qerl.integrations.trl.callback import AQNCallback
from qerl.integrations.trl.rollout import EngineRollout

__all__ = ["AQNCallback", "EngineRollout"]

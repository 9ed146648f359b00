"""What a run will take, before anything of it is loaded: bytes by part and phase, what fits a card, seconds of a step.

    config.json, headers of a packed folder -> ModelShape     shapes.py
    ModelShape, RunConfig, Target -> Memory                   memory.py    bytes by part, in four phases
      .. -> micro-batches, layers that recompute              update.py    the update's activations
    Memory, a card's bytes -> limits, nearest settings        fit.py       also what `qerl train` refuses by
    ModelShape, RunConfig -> seconds                          rates.py     from measured rates alone
                                                              show.py      the tables of `qerl plan`

It is a plan for the worst that the config allows: prompts of `task.max_prompt_length` tokens, and every completion of
full length. Sums are arithmetic over shapes; no tensor is made, no weight is read, and no GPU is asked for. 1 GB is
1e9 bytes. Knows the families and the layers of qerl's own engine. docs/memory.md explains the parts.
"""

from qerl.plan.fit import check_fits
from qerl.plan.memory import Memory, plan_memory
from qerl.plan.shapes import ModelShape, read_shape
from qerl.plan.target import Target
from qerl.plan.update import MICRO_BATCH_TOKENS

__all__ = ["MICRO_BATCH_TOKENS", "Memory", "ModelShape", "Target", "check_fits", "plan_memory", "read_shape"]

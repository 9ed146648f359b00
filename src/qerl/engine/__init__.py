"""Token ids in, completions out, sampled from the trainer's own packed weights. docs/engine.md: a request's life."""

from qerl.engine.api import Engine, Progress, SyncReport
from qerl.engine.engine import build_engine
from qerl.engine.vllm.setup import check_engine

__all__ = ["Engine", "Progress", "SyncReport", "build_engine", "check_engine"]

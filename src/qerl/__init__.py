"""qerl: reinforcement learning of large language models on one GPU, over frozen NVFP4 weights.

    qerl.Trainer      the training loop with the arguments of TRL's trainers            api.py
    qerl.Config       a run's settings, docs/configuration.md                           config.py
    qerl.Generator    sampling from a model with or without an adapter                  generate.py
    qerl.NVFP4Config  the format, for transformers' from_pretrained; or MXFP4Config     integrations/transformers.py

What they need is imported when they are first asked for: `import qerl` alone loads nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.api import Trainer
    from qerl.config import RunConfig as Config
    from qerl.generate import Generator
    from qerl.integrations.transformers import MXFP4Config, NVFP4Config

__version__ = "0.1.0"
__all__ = ["Config", "Generator", "MXFP4Config", "NVFP4Config", "Trainer", "__version__"]

_PLACES = {
    "MXFP4Config": ("qerl.integrations.transformers", "MXFP4Config"),
    "NVFP4Config": ("qerl.integrations.transformers", "NVFP4Config"),
    "Config": ("qerl.config", "RunConfig"),
    "Generator": ("qerl.generate", "Generator"),
    "Trainer": ("qerl.api", "Trainer"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'qerl' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})

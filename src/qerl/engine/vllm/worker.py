"""What runs where vLLM's model is: adapters from memory into its LoRA buffers, noise onto its norms.

vLLM mixes the class into its workers: `--worker-extension-cls qerl.engine.vllm.worker.PolicyWorker`. Its methods are
then called by name from anywhere (`LLM.collective_rpc("qerl_add_noise", args=...)`, or a server's /collective_rpc); in
one process also without that, as functions of a worker. Noise needs no tensors on the way: each worker draws Z itself.

Whoever changes adapters or noise resets vLLM's prefix cache afterwards. Weights may be loaded anew between two draws,
not while noise is on. Called by engine.py and integrations/trl/callback.py.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from qerl.engine.vllm.adapters import Factors, names_missing
from qerl.engine.vllm.norms import NoisyNorms
from qerl.formats.folding import read_folds
from qerl.noise import ROLLOUT_STREAM, NoiseDraw

ADAPTER_ID = 1
"""Of the one adapter, in LoRA requests."""


class PolicyWorker:
    """Methods for a worker of vLLM's; `self` is the worker."""

    def qerl_add_noise(self: Any, seed: int, step: int, sigma: float, stream: int = ROLLOUT_STREAM) -> dict[str, float]:
        """Write w + Z: how many `vectors`, and the share of their numbers that rounding has `lost`.

        ValueError: the model has no such norms.
        """
        if not hasattr(self, "_qerl_norms"):
            self._qerl_norms = NoisyNorms(self.get_model(), read_folds(Path(self.model_config.model)))
        applied = self._qerl_norms.apply(NoiseDraw(seed, step, sigma), stream)
        return {"vectors": applied.num_vectors, "lost": applied.lost}

    def qerl_remove_noise(self: Any) -> None:
        """The norms as they were."""
        if hasattr(self, "_qerl_norms"):
            self._qerl_norms.restore()

    def qerl_set_adapters(self: Any, factors: Factors) -> None:
        """Replace the adapter `ADAPTER_ID`. ValueError names a linear that vLLM has no place for."""
        weights_of = import_module("vllm.lora.lora_weights").LoRALayerWeights
        manager = self.model_runner.lora_manager._adapter_manager
        if missing := names_missing(factors, manager.modules, manager.packed_modules):
            raise ValueError(f"vLLM's {type(self.get_model()).__name__} takes no adapter at {missing[0]}")
        dtype = manager.lora_config.lora_dtype
        layers = {
            name: weights_of(name, len(a), len(a), a.to(manager.device, dtype), b.to(manager.device, dtype))
            for name, (a, b) in factors.items()
        }
        manager.remove_adapter(ADAPTER_ID)
        adapter = import_module("vllm.lora.lora_model").LoRAModel
        manager.add_adapter(adapter(ADAPTER_ID, max(layer.rank for layer in layers.values()), layers))
        manager.activate_adapter(ADAPTER_ID)

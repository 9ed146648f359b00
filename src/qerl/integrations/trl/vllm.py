"""Noise on the norms of the vLLM that a trainer of TRL samples with, in its process or behind a server.

    colocate   trainer.vllm_generation.llm           LLM.collective_rpc: functions of engine/vllm/worker.py
    server     trainer.vllm_generation.vllm_client   POST /collective_rpc: its methods by name, so the server is
                                                     started with WORKER as its --worker-extension-cls

TRL sends all weights before a rollout, norms among them, and they must be clean then: so noise is there while
`generate` runs and no longer, and the clean copy is taken when it comes. What is wrapped is the innermost `generate`,
since TRL's own may put weights back into vLLM that slept. vLLM's prefix cache is dropped with every change.

Called by callback.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from qerl.engine.vllm.worker import PolicyWorker
from qerl.noise import NoiseDraw

VLLM_TRL_VERSIONS = ">=1.16,<1.17"
"""Versions of TRL that sample with vLLM as the module's text has it; others are refused."""

WORKER = f"{PolicyWorker.__module__}.{PolicyWorker.__name__}"


@dataclass(frozen=True)
class Sampler:
    """Where completions come from, and how its workers are reached."""

    owner: Any
    """Whose `generate` samples."""
    call: Callable[..., dict[str, float] | None]
    """A method of PolicyWorker by name, and its arguments; the first worker's result."""
    drop_prefixes: Callable[[], object]
    group: int
    """Processes that share a number here run one model, and must draw the same noise."""

    def add_noise(self, draw: NoiseDraw, stream: int) -> dict[str, float]:
        """Write w + Z: `vectors`, and the share of their numbers that rounding has `lost`."""
        applied = self.call("qerl_add_noise", draw.seed, draw.step, draw.sigma, stream)
        self.drop_prefixes()
        assert applied is not None
        return applied

    def remove_noise(self) -> None:
        """The norms as they were."""
        self.call("qerl_remove_noise")
        self.drop_prefixes()


def find_sampler(trainer: Any) -> Sampler | None:
    """That of a trainer with `use_vllm`; None in a process that only receives what another one sampled.

    ValueError for another version of TRL.
    """
    if (version := metadata.version("trl")) not in SpecifierSet(VLLM_TRL_VERSIONS):
        raise ValueError(f"AQNCallback with use_vllm needs trl{VLLM_TRL_VERSIONS}, and this is {version}")
    generation = trainer.vllm_generation
    if generation.mode == "colocate":
        return _in_process(generation.llm, trainer.accelerator.process_index // generation.tensor_parallel_size)
    client = getattr(generation, "vllm_client", None)
    return None if client is None else _behind_server(client)


def _in_process(llm: Any, group: int) -> Sampler:
    def call(method: str, *args: Any) -> dict[str, float] | None:
        return llm.collective_rpc(getattr(PolicyWorker, method), args=args)[0]

    def drop_prefixes() -> None:
        if not llm.reset_prefix_cache():
            raise RuntimeError("AQNCallback: vLLM keeps a prefix cache that was computed under other noise")

    return Sampler(llm, call, drop_prefixes, group)


def _behind_server(client: Any) -> Sampler:
    from requests.exceptions import RetryError  # TRL has it

    def call(method: str, *args: Any) -> dict[str, float] | None:
        with suppress(RetryError):  # TRL's session asks again on a 500
            answer = client.session.post(f"{client.base_url}/collective_rpc", json={"method": method, "args": args})
            if answer.status_code == 200:
                return answer.json()["results"][0]
        raise RuntimeError(
            f"AQNCallback: the vLLM server did not do {method} (its log says why): start it with "
            f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {WORKER}, in an environment that has qerl"
        )

    return Sampler(client, call, client.reset_prefix_cache, 0)

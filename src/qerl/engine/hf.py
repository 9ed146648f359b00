"""The slow engine: any causal language model, through transformers' own forward pass and cache.

    max_batch_size completions at a time, prompts padded on the left -> [ forward -> sample ]* until all have ended

Same calls, same sampler, same keys and same noise streams as engine.py. Adapters need no copy, since the model applies
them itself; noise is noise.applied. What it lacks is speed: every completion runs its prompt, a batch waits for its
longest completion, and the settings of memory (`rollout.kv_cache_*`, `prefill_tokens`) have no effect. So it says aloud
that it is in use.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qerl.config import RolloutConfig
from qerl.engine.api import Progress, SyncReport, check_requests, empty_completion
from qerl.engine.probe import probe, probe_tokens
from qerl.engine.sampler import sample, signed_key
from qerl.nn.structure import causal_lm, max_positions
from qerl.noise import ROLLOUT_STREAM, NoiseDraw, applied, noise_sites
from qerl.types import Completion, Request, SamplingParams


class TransformersEngine:
    """See the module's text."""

    def __init__(self, model: nn.Module, *, eos_ids: Sequence[int], config: RolloutConfig, reason: str) -> None:
        """reason: why it is used, for the warning."""
        self._model, self._lm = model, causal_lm(model)
        self._eos_ids, self._config = frozenset(eos_ids), config
        self.decode_steps = 0
        embedding: Any = self._lm.get_input_embeddings()
        self._device: torch.device = embedding.weight.device
        self._vocab_size = len(embedding.weight)
        parameters = inspect.signature(self._lm.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # the old name goes with 5.40
        self._has_positions, self._can_skip_logits = "position_ids" in parameters, "logits_to_keep" in parameters
        warnings.warn(f"sampling with transformers' forward pass, which is slow: {reason}", UserWarning, stacklevel=3)
        self.sync(None)

    @torch.inference_mode()
    def sync(self, draw: NoiseDraw | None) -> SyncReport:
        """See `Engine.sync`. The model holds adapters and norms itself; only the draw is new."""
        self._draw = draw
        adapters = [m for m in self._lm.modules() if isinstance(m, LoraLayer)]
        factors = [cast(nn.Linear, m.lora_B[name]) for m in adapters for name in m.active_adapters if name in m.lora_B]
        largest_b = [b.weight.abs().amax() for b in factors]
        sites = noise_sites(self._model) if draw is not None and draw.sigma > 0 else []
        tokens = probe_tokens(self._vocab_size, self._device)[None]
        stream = ROLLOUT_STREAM if draw is None else draw.stream(0)

        def logits(adapter_gain: float, noise: NoiseDraw | None) -> Tensor:
            with _in_eval_mode(self._model), _scaled(adapters, adapter_gain), applied(self._model, noise, [stream]):
                return self._lm(input_ids=tokens, use_cache=False).logits[0].float()

        largest = torch.stack(largest_b).float() if largest_b else torch.zeros(0)
        return probe(logits, draw, largest, len(sites), len(sites))

    def sleep(self) -> None:
        """See `Engine.sleep`. Transformers' cache lives for one batch, so there is nothing to give back."""

    def wake(self) -> None:
        """See `Engine.wake`."""

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        check_requests(requests, self._vocab_size, max_positions(self._lm))
        results = [[empty_completion() for _ in request.seeds] for request in requests]
        todo = [
            (i, j) for i, request in enumerate(requests) if request.max_new_tokens for j in range(len(request.seeds))
        ]
        total = sum(len(request.seeds) for request in requests)
        num_done = total - len(todo)
        with _in_eval_mode(self._model):
            for batch in _batches(todo, self._config.max_batch_size):
                completions = self._run([(requests[i], j) for i, j in batch], sampling)
                for (i, j), completion in zip(batch, completions, strict=True):
                    results[i][j] = completion
                num_done += len(batch)
                if progress is not None:
                    progress(num_done, total)
        return results

    def _run(self, batch: Sequence[tuple[Request, int]], sampling: SamplingParams) -> list[Completion]:
        device = self._device
        width = max(len(request.prompt_ids) for request, _ in batch)
        padding = [width - len(request.prompt_ids) for request, _ in batch]
        tokens = torch.tensor(
            [[0] * pad + r.prompt_ids for pad, (r, _) in zip(padding, batch, strict=True)], device=device
        )
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).to(device, torch.int64)
        seeds = torch.tensor([signed_key(request.seeds[j]) for request, j in batch], device=device)
        limits = [request.max_new_tokens for request, _ in batch]
        drawn: list[tuple[list[int], list[float], list[float]]] = [([], [], []) for _ in batch]
        going = set(range(len(batch)))

        def draw_next(logits: Tensor, count: int) -> Tensor:
            sampled = sample(logits, seeds, torch.full_like(seeds, count), sampling)
            ids, logprobs, entropies = (column.tolist() for column in sampled)
            for row in sorted(going):
                for values, value in zip(drawn[row], (ids[row], logprobs[row], entropies[row]), strict=True):
                    values.append(value)
                if ids[row] in self._eos_ids or count + 1 == limits[row]:
                    going.discard(row)
            return sampled.tokens[:, None]

        streams, index = self._streams([(request.prompt_index, None) for request, _ in batch])
        with applied(self._model, self._draw, streams, index.repeat_interleave(width)):
            logits, cache = self._forward(tokens, mask, mask.cumsum(1).sub(1).clamp_min(0), None)
        tokens = draw_next(logits, 0)
        streams, index = self._streams([(request.prompt_index, j) for request, j in batch])
        with applied(self._model, self._draw, streams, index):
            for count in range(1, max(limits)):
                if not going:
                    break
                mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
                logits, cache = self._forward(tokens, mask, mask.sum(1, keepdim=True) - 1, cache)
                self.decode_steps += 1
                tokens = draw_next(logits, count)
        return [
            Completion(ids, logprobs, entropies, "stop" if ids[-1] in self._eos_ids else "length")
            for ids, logprobs, entropies in drawn
        ]

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits after the last token of each row, and the cache."""
        options: dict[str, Any] = {self._cache_name: cache}
        if self._has_positions:
            options["position_ids"] = positions
        if self._can_skip_logits:
            options["logits_to_keep"] = 1
        output = self._lm(input_ids=tokens, attention_mask=mask, use_cache=True, **options)
        return output.logits[:, -1], getattr(output, self._cache_name)

    def _streams(self, places: Sequence[tuple[int, int | None]]) -> tuple[list[int], Tensor]:
        """The noise streams of (prompt, sample) pairs, each once, and which one each pair has."""
        streams = [ROLLOUT_STREAM if self._draw is None else self._draw.stream(*place) for place in places]
        unique = list(dict.fromkeys(streams))
        return unique, torch.tensor([unique.index(stream) for stream in streams], device=self._device)


def _batches(items: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@contextmanager
def _in_eval_mode(model: nn.Module) -> Generator[None]:
    """Dropout off; every module's mode comes back as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _scaled(adapters: Sequence[LoraLayer], factor: float) -> Generator[None]:
    """Multiply the scaling of every adapter."""
    before = [dict(adapter.scaling) for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.scaling.update({name: value * factor for name, value in adapter.scaling.items()})
        yield
    finally:
        for adapter, scaling in zip(adapters, before, strict=True):
            adapter.scaling.update(scaling)

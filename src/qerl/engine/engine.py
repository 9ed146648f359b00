"""The rollout engine: schedule, run, sample, collect.

    sync      adapters and norms: model -> buffers; probe                                   model.py, norms.py, probe.py
    generate  requests -> groups -> [ admit -> prefill -> start -> decode -> take ]* -> completions
                                      scheduler.py   runner.py, which uses model.py, attention.py, sampler.py, graphs.py

The base weights are the trainer's own tensors. Keys and values live for one call of `generate`, so none can outlive a
policy or noise update. `build_engine` picks this engine where it knows the architecture, else hf.py, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from qerl.config import RolloutConfig
from qerl.engine.api import Engine, Progress, SyncReport, check_requests, empty_completion
from qerl.engine.attention import PromptAttention
from qerl.engine.hf import TransformersEngine
from qerl.engine.kv_cache import PAGE_SIZE, KVCache, PagePool, num_pages
from qerl.engine.model import Decoder, sliding_window, unsupported
from qerl.engine.norms import Gains
from qerl.engine.probe import probe, probe_tokens
from qerl.engine.runner import Runner
from qerl.engine.scheduler import Group, Running, Scheduler
from qerl.nn.structure import max_positions
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams


def build_engine(model: nn.Module, *, eos_ids: Sequence[int], config: RolloutConfig) -> Engine:
    """An engine over the model's own weights, synchronised without noise.

    model: transformers' causal language model, with or without PEFT; eos_ids: every id that ends a completion (all of
    generation_config's). ValueError if `rollout.engine` asks for qerl's engine and it cannot run the model.
    """
    reason = unsupported(model)
    window = sliding_window(model)
    if reason is None and window is not None and config.max_completion_length >= window:
        reason = f"its layers see {window} tokens, fewer than rollout.max_completion_length needs"
    if config.engine == "qerl" and reason is not None:
        raise ValueError(f'rollout.engine = "qerl" cannot sample from this model: {reason}; use "auto" or "hf"')
    if config.engine == "hf" or reason is not None:
        return TransformersEngine(model, eos_ids=eos_ids, config=config, reason=reason or 'rollout.engine is "hf"')
    return PagedEngine(model, eos_ids=eos_ids, config=config)


class PagedEngine:
    """Continuous batching over a paged cache; see the module's text."""

    def __init__(self, model: nn.Module, *, eos_ids: Sequence[int], config: RolloutConfig) -> None:
        self._eos_ids, self._config = list(eos_ids), config
        self._window, self._max_positions = sliding_window(model), max_positions(model)
        with torch.inference_mode():
            self._decoder = Decoder(model)
        self.sync(None)

    @torch.inference_mode()
    def sync(self, draw: NoiseDraw | None) -> SyncReport:
        """See `Engine.sync`."""
        decoder = self._decoder
        largest_b, num_noised = decoder.sync(draw)
        tokens = probe_tokens(decoder.vocab_size, decoder.device)
        positions = torch.arange(len(tokens), device=decoder.device)

        def logits(adapter_gain: float, noise: NoiseDraw | None) -> torch.Tensor:
            norms = decoder.norms
            rows = norms.shared if noise == draw else norms.gains([norms.stream(0)], noise)
            attend = PromptAttention([len(tokens)], decoder.device)
            hidden = decoder.forward(tokens, positions, Gains(rows), attend, adapter_gain=adapter_gain)
            return decoder.logits(hidden).float()

        return probe(logits, draw, largest_b, num_noised, len(decoder.norms.clean))

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        check_requests(requests, self._decoder.vocab_size, self._max_positions)
        results = [[empty_completion() for _ in request.seeds] for request in requests]
        groups = [Group(i, request) for i, request in enumerate(requests) if request.seeds and request.max_new_tokens]
        total = sum(len(request.seeds) for request in requests)
        num_done = total - sum(len(group.request.seeds) for group in groups)
        if not groups:
            return results
        num_slots = min(total - num_done, self._config.max_batch_size)
        pages = self._num_pages(groups, num_slots)
        self._check_fit(groups, pages)
        cache = self._new_cache(pages + 1)  # and a spare page, see runner.py
        pool = PagePool(pages)
        scheduler = Scheduler(groups, pool, num_slots)
        runner = Runner(
            self._decoder,
            cache,
            sampling,
            self._eos_ids,
            num_slots=num_slots,
            pages_per_slot=max(group.sequence_pages for group in groups),
            max_new_tokens=max(group.request.max_new_tokens for group in groups),
            spare_page=pool.size,
            graphs=self._config.cuda_graphs,
        )
        while not scheduler.is_done:
            for running, completion in self._step(scheduler, runner):
                results[running.group.index][running.sample] = completion
                num_done += 1
            if progress is not None:
                progress(num_done, total)
        pool.assert_all_free()
        return results

    def _step(self, scheduler: Scheduler, runner: Runner) -> list[tuple[Running, Completion]]:
        """Start what fits, decode, and return what has ended."""
        admission = scheduler.admit()
        runner.prefill(admission.prompts)
        runner.start(admission.started, len(scheduler.running) - len(admission.started))
        ended = runner.decode(len(scheduler.running))
        completed = [
            (scheduler.running[slot], completion) for slot, completion in zip(ended, runner.take(ended), strict=True)
        ]
        if ended:
            runner.move(scheduler.finish(ended), len(scheduler.running))
        return completed

    def _num_pages(self, groups: Sequence[Group], num_slots: int) -> int:
        """Pages of the cache: as `rollout.kv_cache_tokens` says, or what all slots can ever need."""
        if self._config.kv_cache_tokens is not None:
            return self._config.kv_cache_tokens // PAGE_SIZE
        # Next to the slots' pages, one prompt's: of the group that has started in part.
        return num_slots * max(g.sequence_pages for g in groups) + max(num_pages(g.prompt_length) for g in groups)

    def _check_fit(self, groups: Sequence[Group], pool_size: int) -> None:
        for group in groups:
            prompt, new = group.prompt_length, group.request.max_new_tokens
            request = f"request {group.index}: a prompt of {prompt} tokens and up to {new} new ones"
            if group.pages_alone > pool_size:
                raise ValueError(
                    f"{request} need {group.pages_alone * PAGE_SIZE} tokens of KV cache and there are "
                    f"{pool_size * PAGE_SIZE}: raise rollout.kv_cache_tokens, or lower rollout.max_completion_length"
                )
            if self._window is not None and prompt + new > self._window:
                raise ValueError(
                    f"{request} exceed the model's sliding window of {self._window}, which this engine does not know: "
                    'set rollout.engine = "hf"'
                )

    def _new_cache(self, pages: int) -> KVCache:
        decoder = self._decoder
        try:
            return KVCache(
                layers=decoder.num_layers,
                pages=pages,
                kv_heads=decoder.kv_heads,
                head_dim=decoder.head_dim,
                dtype=decoder.dtype,
                device=decoder.device,
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory for a KV cache of {pages * PAGE_SIZE} tokens: lower rollout.kv_cache_tokens, or "
                "rollout.max_batch_size where that is not set"
            ) from error

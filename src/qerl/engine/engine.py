"""The rollout engine: schedule, run, sample, collect.

    sync      adapters and norms: model -> buffers; probe                                   model.py, norms.py, probe.py
    generate  requests -> groups of drafts -> [ reserve -> admit -> prefill -> start -> decode -> take ]* -> completions
                                      scheduler.py   runner.py, which uses model.py, attention.py, sampler.py, graphs.py

What lives how long:

    decoder  as the engine: copies of adapters and norms; the base weights are the trainer's own tensors
    cache    until a call needs a larger one: keys and values; `sleep` takes its memory and leaves its address
    runner   as the cache, and while sampling parameters, kind of noise and adapters' ranks stay: slots, captured graphs
    pages    one call of `generate`, so that nothing computed under another policy or noise is ever read

Where memory has no address of its own (mapped.py: a CPU, no cuda.bindings), cache and runner end with `sleep`.
`build_engine` picks this engine where it knows the architecture, else hf.py, with a warning; vllm/ if it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import NamedTuple

import torch
from torch import nn

from qerl.config import RolloutConfig
from qerl.engine.api import Engine, Progress, SyncReport, check_requests, empty_completion
from qerl.engine.attention import PromptAttention
from qerl.engine.budget import check_pages, num_pool_pages, total_bytes
from qerl.engine.drafts import Draft, Group, pages_alone
from qerl.engine.hf import TransformersEngine
from qerl.engine.kv_cache import PAGE_SIZE, KVCache, PagePool, num_pages, token_bytes
from qerl.engine.model import Decoder, sliding_window, unsupported
from qerl.engine.norms import Gains
from qerl.engine.probe import probe, probe_tokens
from qerl.engine.runner import Runner
from qerl.engine.scheduler import Scheduler
from qerl.engine.speculation import Speculation
from qerl.engine.vllm.engine import VLLMEngine
from qerl.kernels.attention import HEAD_DIMS, has_kernel
from qerl.nn.structure import max_positions
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

logger = logging.getLogger(__name__)


def build_engine(
    model: nn.Module, *, eos_ids: Sequence[int], config: RolloutConfig, max_prompt_length: int | None = None
) -> Engine:
    """An engine over the model's own weights, synchronised without noise.

    model: transformers' causal language model, with or without PEFT; eos_ids: every id that ends a completion (all of
    generation_config's); max_prompt_length: of all prompts to come, in tokens, where it is known. ValueError if
    `rollout.engine` asks for qerl's engine and it cannot run the model, or if the KV cache that it allows cannot
    hold the longest sequence.
    """
    if config.engine == "vllm":
        return VLLMEngine(model, eos_ids=eos_ids, config=config, max_prompt_length=max_prompt_length)
    reason = unsupported(model)
    window = sliding_window(model)
    if reason is None and window is not None and config.max_completion_length >= window:
        reason = f"its layers see {window} tokens, fewer than rollout.max_completion_length needs"
    if config.engine == "qerl" and reason is not None:
        raise ValueError(f'rollout.engine = "qerl" cannot sample from this model: {reason}; use "auto" or "hf"')
    if config.engine == "hf" or reason is not None:
        for name in _OWN_SETTINGS:
            if getattr(config, name) != RolloutConfig.model_fields[name].default:
                raise ValueError(
                    f"rollout.{name} is of qerl's own engine, and this run samples through transformers: "
                    f"{reason or 'rollout.engine is hf'}; leave it out"
                )
        return TransformersEngine(model, eos_ids=eos_ids, config=config, reason=reason or 'rollout.engine is "hf"')
    return PagedEngine(model, eos_ids=eos_ids, config=config, max_prompt_length=max_prompt_length)


_OWN_SETTINGS = ("batch_invariant", "kv_cache_dtype", "head_format")
"""What changes results, and transformers' engine does not have."""


class _Sizes(NamedTuple):
    """What cache and slots are made for. They only grow, so that graphs are seldom captured again."""

    slots: int
    pages_per_slot: int
    max_new_tokens: int


class PagedEngine:
    """Continuous batching over a paged cache; see the module's text."""

    def __init__(
        self, model: nn.Module, *, eos_ids: Sequence[int], config: RolloutConfig, max_prompt_length: int | None = None
    ) -> None:
        self._eos_ids, self._config = list(eos_ids), config
        self._window, self._max_positions = sliding_window(model), max_positions(model)
        with torch.inference_mode():
            self._decoder = decoder = Decoder(
                model, batch_invariant=config.batch_invariant, packs_head=config.head_format == "nvfp4"
            )
        if decoder.device.type == "cuda":
            _check_attention(decoder.dtype, decoder.head_dim, batch_invariant=config.batch_invariant)
        self._fp8 = config.kv_cache_dtype == "fp8"
        of_token = token_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize, fp8=self._fp8)
        self._page_bytes, self._total_bytes = decoder.num_layers * PAGE_SIZE * of_token, total_bytes(decoder.device)
        self._sizes = _Sizes(0, 0, 0)
        self._most_pages: int | None = None
        self._cache: KVCache | None = None
        self._runner: Runner | None = None
        self.decode_steps = 0
        self._captured: tuple[object, ...] = ()  # what the runner's graphs hold beside addresses
        if max_prompt_length is not None:
            new = config.max_completion_length
            self._sizes = _Sizes(0, num_pages(max_prompt_length + new), new)
            # A prompt that ends with a page needs no second copy of it, so one token less can take a page more.
            needed = max(pages_alone(prompt, new) for prompt in (max_prompt_length, max(1, max_prompt_length - 1)))
            self._check_memory(f"a prompt of up to {max_prompt_length} tokens and up to {new} new ones", needed)
        self.sync(None)

    @torch.inference_mode()
    def sync(self, draw: NoiseDraw | None) -> SyncReport:
        """See `Engine.sync`."""
        decoder, ranks = self._decoder, self._ranks()
        try:
            largest_b, num_noised = decoder.sync(draw)
        finally:
            if self._ranks() != ranks:
                self._runner = None  # adapters of new ranks are elsewhere, and graphs read them where they were
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
    def sleep(self) -> None:
        """See `Engine.sleep`. Slots and graphs stay if the cache's address does."""
        if self._cache is None or not self._cache.sleep():
            self._drop()
            if self._decoder.device.type == "cuda":
                torch.cuda.empty_cache()  # else something small may come to hold the memory of the whole pool
        if self._runner is not None:
            self._runner.reset()  # a call that was broken off has left logits

    def _drop(self) -> None:
        """No cache from now on, and nothing that holds its address."""
        self._cache = self._runner = None

    @torch.inference_mode()
    def wake(self) -> None:
        """See `Engine.wake`. The number of slots is known from the first call of `generate` on."""
        if self._sizes.slots:
            with suppress(torch.OutOfMemoryError):  # `generate` asks again, and for less
                self._woken_cache()

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        check_requests(requests, self._decoder.vocab_size, self._max_positions)
        while True:
            try:
                return self._generate(requests, sampling, progress)
            except torch.OutOfMemoryError:
                pages = self._fewer_pages()
            # Only here the exception, and with it what its frames held, is gone. Seeds are keys: tokens come as before.
            self._shrink(pages)

    def _generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None
    ) -> list[list[Completion]]:
        results = [[empty_completion() for _ in request.seeds] for request in requests]
        groups = [Group(i, request) for i, request in enumerate(requests) if request.seeds and request.max_new_tokens]
        total = sum(len(request.seeds) for request in requests)
        num_done = total - sum(group.num_left for group in groups)
        if not groups:
            return results
        self._check_fit(groups)
        cache, runner = self._prepared(groups, sampling)
        speculation = Speculation(
            is_on=self._config.speculation,
            steps_per_look=runner.steps_per_look,
            batch_invariant=self._config.batch_invariant,
        )
        pool = PagePool(cache.num_pages - 1)  # the last page is the runner's spare one
        scheduler = Scheduler(
            groups,
            pool,
            num_slots=self._sizes.slots,
            prefill_tokens=self._config.prefill_tokens,
            longest_reach=speculation.longest_reach,
            batch_invariant=self._config.batch_invariant,
        )
        while not scheduler.is_done:
            ended, num_steps = step(scheduler, runner, speculation)
            self.decode_steps += num_steps
            for draft, completion in ended:
                results[draft.group.index][draft.sample] = completion
                num_done += 1
            if progress is not None:
                progress(num_done, total)
        pool.assert_all_free()
        return results

    def _check_memory(self, what: str, needed: int) -> None:
        check_pages(self._config, self._page_bytes, self._total_bytes, needed, what)

    def _check_fit(self, groups: Sequence[Group]) -> None:
        for group in groups:
            prompt, new = group.prompt_length, group.request.max_new_tokens
            request = f"request {group.index}: a prompt of {prompt} tokens and up to {new} new ones"
            self._check_memory(request, pages_alone(prompt, new))
            if self._window is not None and prompt + new > self._window:
                raise ValueError(
                    f"{request} exceed the model's sliding window of {self._window}, which this engine does not know: "
                    'set rollout.engine = "hf"'
                )

    def _prepared(self, groups: Sequence[Group], sampling: SamplingParams) -> tuple[KVCache, Runner]:
        """A cache and a runner that are large enough, as they are or made anew."""
        wanted = _Sizes(
            min(sum(group.num_left for group in groups), self._config.max_batch_size),
            max(num_pages(group.prompt_length + group.request.max_new_tokens) for group in groups),
            max(group.request.max_new_tokens for group in groups),
        )
        sizes = _Sizes(*map(max, self._sizes, wanted))
        if sizes != self._sizes:
            self._drop()
            self._sizes = sizes
        # A page more, for guesses past the end. More than before: then no graph is left.
        self._decoder.reach((sizes.pages_per_slot + 1) * PAGE_SIZE)
        cache = self._woken_cache()
        captured = (astuple(sampling), self._decoder.norms.per_slot)
        if self._runner is None or captured != self._captured:
            self._runner = None  # before the next one takes memory
            self._runner = Runner(
                self._decoder,
                cache,
                sampling,
                self._eos_ids,
                num_slots=sizes.slots,
                pages_per_slot=sizes.pages_per_slot,
                max_new_tokens=sizes.max_new_tokens,
                graphs=self._config.cuda_graphs,
                batch_invariant=self._config.batch_invariant,
                speculates=self._config.speculation,
            )
            self._captured = captured
        self._runner.reset()
        return cache, self._runner

    def _ranks(self) -> list[list[int]]:
        return [projection.ranks for projection in self._decoder.projections]

    def _num_pages(self) -> int:
        """Of the pool: as many as all slots can need, or as are allowed, or fewer once memory has run out."""
        sizes = self._sizes
        pages = num_pool_pages(
            self._config,
            self._page_bytes,
            self._total_bytes,
            slots=sizes.slots,
            pages_per_slot=sizes.pages_per_slot,
        )
        return pages if self._most_pages is None else min(pages, max(self._most_pages, sizes.pages_per_slot + 1))

    def _fewer_pages(self) -> int:
        """Three quarters of the pages, or as many as one sequence can need. OutOfMemoryError: it has no more."""
        pages, needed = self._num_pages(), self._sizes.pages_per_slot + 1
        if pages <= needed:
            raise torch.OutOfMemoryError(
                f"no memory to sample one sequence at a time, with a KV cache of {pages * PAGE_SIZE} tokens: lower "
                "rollout.max_completion_length or rollout.max_batch_size; `qerl plan` says what takes the memory"
            ) from None
        return max(needed, pages * 3 // 4)

    def _shrink(self, pages: int) -> None:
        """From now on the cache has no more pages."""
        self._drop()
        self.sleep()
        logger.warning(
            "out of memory in the rollout; it goes on with a KV cache of %d tokens in place of %d "
            "(set rollout.kv_cache_tokens to begin with it)",
            pages * PAGE_SIZE,
            self._num_pages() * PAGE_SIZE,
        )
        self._most_pages = pages

    def _woken_cache(self) -> KVCache:
        """The pool and a spare page, as they were before `sleep` or made anew."""
        if self._cache is not None:
            self._cache.wake()
            return self._cache
        decoder = self._decoder
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # what activations have left behind makes room for the pool, and for its graphs
        self._cache = KVCache(
            layers=decoder.num_layers,
            pages=1 + self._num_pages(),
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            fp8=self._fp8,
        )
        return self._cache


def step(scheduler: Scheduler, runner: Runner, speculation: Speculation) -> tuple[list[tuple[Draft, Completion]], int]:
    """Make room, start what fits, decode up to the next look; what has ended, and the number of decode steps."""
    running = scheduler.running
    reach = speculation.reach(len(running)) if running else speculation.longest_reach
    if interrupted := scheduler.reserve(reach):
        drawn = runner.take(interrupted, [running[slot] for slot in interrupted])
        runner.move(scheduler.suspend(interrupted, drawn), len(running))
    admission = scheduler.admit()
    runner.prefill(admission.chunks)
    runner.start(admission.started, len(running) - len(admission.started))
    runner.map_pages(scheduler.unmapped_pages())
    if not running:
        return [], 0  # a long prompt is on its way
    tokens = speculation.tokens(len(running))
    steps = min(speculation.steps(tokens), reach // tokens, scheduler.most_left)  # one token each, at least
    ended, counts = runner.decode(len(running), steps, tokens, scheduler.num_context_pages)
    gone_on = set(range(len(running))) - set(ended)
    speculation.observe(tokens, steps, [counts[slot] - running[slot].count for slot in gone_on])
    drafts = [running[slot] for slot in ended]
    completions = runner.take(ended, drafts)
    moves = scheduler.finish(ended, counts)
    if ended:
        runner.move(moves, len(running))
    return list(zip(drafts, completions, strict=True)), steps


def _check_attention(dtype: torch.dtype, head_dim: int, *, batch_invariant: bool) -> None:
    """A warning where decode attention on a GPU is not the kernel; ValueError where bits must not depend on a batch."""
    if has_kernel(dtype, head_dim):
        return
    if batch_invariant:
        raise ValueError(
            f"rollout.batch_invariant on a GPU needs bfloat16 and heads of {HEAD_DIMS}, the model has {dtype} and "
            f'heads of {head_dim}: set model.dtype = "bfloat16", or rollout.batch_invariant = false'
        )
    logger.warning(
        "decode attention has no kernel for %s and heads of %d: it copies the pages that it reads, slowly",
        dtype,
        head_dim,
    )

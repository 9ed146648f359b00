"""vLLM as the engine: same calls, same noise, adapters alone in the sync; its own copy of the base.

    sync      adapters, noise: trainer -> vLLM's LoRA buffers and norms, in memory; prefix cache dropped; probe
    generate  requests -> vLLM's scheduler, one of its requests a seed -> [ step ]* -> completions

What differs from the engine of this package:

* The base is in memory twice, the trainer's and vLLM's; on a GPU vLLM's goes to the host's memory while it sleeps.
* `rollout_logprobs` are those of the distribution that vLLM drew from (`processed_logprobs`): at the sampling
  temperature, from its kernels and its roundings, which importance correction sees. Under top-p, top-k or min-p they
  would be those after truncation, so completions have NaN; so have greedy ones at a temperature that is not 1.
* There are no entropies.
* Noise is one Z a rollout, rounded to the dtype of vLLM's norms (norms.py).
* A seed gives the same tokens for the same batch; vLLM does not promise them for another one.

The engine runs in this process, so that tensors need no serialisation. Of vLLM there is one at a time in a process: a
new one shuts the one before it down. Built by `build_engine`; setup.py and config.py refuse what they can before that.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, get_args

import torch
from torch import Tensor, nn

from qerl.config import RolloutConfig, TaskConfig, parse_memory
from qerl.engine.api import Progress, SyncReport, check_requests, empty_completion
from qerl.engine.budget import total_bytes
from qerl.engine.kv_cache import token_bytes
from qerl.engine.probe import probe, probe_tokens
from qerl.engine.vllm.adapters import Factors, adapter_factors
from qerl.engine.vllm.norms import lost_warning
from qerl.engine.vllm.worker import ADAPTER_ID, PolicyWorker
from qerl.nn.structure import causal_lm, decoder_layers, head, head_dim, max_positions
from qerl.noise import NoiseDraw, noise_sites
from qerl.types import Completion, Request, SamplingParams

_BLOCK = 128  # tokens: the largest block of keys and values that vLLM chooses by itself (on a CPU; 16 on a GPU)
_USUAL_PROMPT: int = TaskConfig.model_fields["max_prompt_length"].default

logger = logging.getLogger(__name__)


class VLLMEngine:
    """See the module's text."""

    def __init__(
        self, model: nn.Module, *, eos_ids: Sequence[int], config: RolloutConfig, max_prompt_length: int | None = None
    ) -> None:
        """Load the model's folder into vLLM. ValueError: adapters that vLLM cannot apply."""
        lm = causal_lm(model)
        self._open = None
        self.decode_steps = 0
        self._model, self._eos_ids = model, list(eos_ids)
        self._vocab_size = len(head(model).weight)
        self._on_gpu = head(model).weight.device.type == "cuda"
        self._gain = math.nan  # of the adapters that are in vLLM
        self._awake = True
        self._warned = False
        factors = adapter_factors(model)
        context, new = max_positions(model), config.max_completion_length
        self._longest = _longest(max_prompt_length, new, context)
        _shut_down_the_last_one(self)
        with _in_this_process():
            vllm: Any = import_module("vllm")
            self._vllm = vllm
            self._open: Any = vllm.LLM(
                model=lm.name_or_path,
                skip_tokenizer_init=True,  # token ids in, token ids out
                dtype=str(head(model).weight.dtype).removeprefix("torch."),
                max_model_len=self._longest,
                max_num_seqs=config.max_batch_size,
                max_num_batched_tokens=max(config.prefill_tokens, config.max_batch_size),
                kv_cache_memory_bytes=_kv_bytes(model, config, self._longest, max_prompt_length),
                # Only compared with the free memory: the trainer has its share already, and the cache has its size.
                gpu_memory_utilization=0.01,
                enforce_eager=not (config.cuda_graphs and self._on_gpu),
                enable_sleep_mode=self._on_gpu,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # no sampling settings of the folder's
                **({"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank(factors)} if factors else {}),
            )
        self.sync(None)

    @property
    def _llm(self) -> Any:
        if self._open is None:
            raise RuntimeError("another engine of vLLM's has been built since, and a process runs one at a time")
        return self._open

    @torch.inference_mode()
    def sync(self, draw: NoiseDraw | None) -> SyncReport:
        """See `Engine.sync`. The probe's numbers are log-probabilities of its tokens. ValueError: noise by prompt."""
        if draw is not None and draw.per != "rollout":
            raise ValueError(f'vLLM has one noise for all tokens of a rollout, not one a {draw.per}: take "rollout"')
        self.wake()
        factors = adapter_factors(self._model)
        largest_b = [b.abs().amax().float() for _, b in factors.values()]
        self._gain = math.nan
        noisy = draw is not None and draw.sigma > 0
        sites = len(noise_sites(self._model)) if noisy else 0
        tokens = probe_tokens(self._vocab_size, torch.device("cpu")).tolist()

        def logprobs(adapter_gain: float, noise: NoiseDraw | None) -> Tensor:
            self._set(factors, adapter_gain, noise)
            return torch.tensor(self._prompt_logprobs(tokens))[:, None]

        largest = torch.stack(largest_b).cpu() if largest_b else torch.zeros(0)
        report = probe(logprobs, draw, largest, sites, sites)
        num_noised, lost = self._set(factors, 1.0, draw)
        if num_noised != sites:
            raise RuntimeError(f"dead noise: {num_noised} norms of vLLM's model took it, and the trainer has {sites}")
        if draw is not None and not self._warned and (warning := lost_warning(draw.sigma, lost)):
            logger.warning(warning)
            self._warned = True
        return report

    def sleep(self) -> None:
        """See `Engine.sleep`. On a GPU the weights go to the host's memory, too; on a CPU vLLM keeps all."""
        if self._on_gpu and self._awake:
            self._llm.sleep(level=1)
            self._awake = False

    def wake(self) -> None:
        """See `Engine.wake`."""
        if not self._awake:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what activations have left behind makes room for vLLM's memory
            self._llm.wake_up()
            self._awake = True

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        check_requests(requests, self._vocab_size, self._longest)
        self.wake()
        results = [[empty_completion() for _ in request.seeds] for request in requests]
        places = [(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))]
        todo = [(i, j) for i, j in places if requests[i].max_new_tokens]

        def ended(output: Any, num_done: int) -> None:
            i, j = todo[int(output.request_id)]
            results[i][j] = _completion(output.outputs[0], sampling)
            if progress is not None:
                progress(len(places) - len(todo) + num_done, len(places))

        self._run([(requests[i].prompt_ids, self._params(requests[i], j, sampling)) for i, j in todo], ended)
        return results

    def _params(self, request: Request, sample: int, sampling: SamplingParams) -> Any:
        """What vLLM is asked for one completion."""
        chosen: dict[str, Any] = {"temperature": 0.0}
        if not sampling.greedy:
            chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            chosen |= {"min_p": sampling.min_p, "seed": request.seeds[sample] % 2**63}
        return self._vllm.SamplingParams(
            max_tokens=request.max_new_tokens, logprobs=0, detokenize=False, **self._ends(), **chosen
        )

    def _ends(self) -> dict[str, Any]:
        """The ids that end a completion are ours, not those that vLLM finds in the folder."""
        return {"ignore_eos": True, "stop_token_ids": self._eos_ids}

    def _prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Of each token but the first, after those before it."""
        params = self._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, **self._ends()
        )
        outputs: list[Any] = []
        self._run([(tokens, params)], lambda output, num_done: outputs.append(output))
        (output,) = outputs
        return [by_id[token].logprob for token, by_id in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]

    def _run(self, prompts: Sequence[tuple[list[int], Any]], ended: Callable[[Any, int], None]) -> None:
        """All prompts through vLLM; `ended` is called with each output and how many there were."""
        engine, request = self._llm.llm_engine, None
        if not math.isnan(self._gain):
            request = import_module("vllm.lora.request").LoRARequest("policy", ADAPTER_ID, "in memory")
        num_done = 0
        try:
            for number, (tokens, params) in enumerate(prompts):
                params.output_kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
                engine.add_request(str(number), {"prompt_token_ids": tokens}, params, lora_request=request)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    num_done += 1
                    ended(output, num_done)
        finally:
            if engine.has_unfinished_requests():
                engine.abort_request([str(number) for number in range(len(prompts))])

    def _set(self, factors: Factors, gain: float, draw: NoiseDraw | None) -> tuple[int, float]:
        """Adapters times `gain`, and noise, in vLLM; noisy norms, and the share of their numbers that rounding lost."""
        if factors and gain != self._gain:
            scaled = {name: (a, b * gain) for name, (a, b) in factors.items()}
            self._llm.collective_rpc(PolicyWorker.qerl_set_adapters, args=(scaled,))
            self._gain = gain
        if draw is None or draw.sigma == 0:
            self._llm.collective_rpc(PolicyWorker.qerl_remove_noise)
            applied = {"vectors": 0, "lost": 0.0}
        else:
            (applied,) = self._llm.collective_rpc(PolicyWorker.qerl_add_noise, args=(draw.seed, draw.step, draw.sigma))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache, which was computed under other adapters or noise")
        return int(applied["vectors"]), applied["lost"]


_last: weakref.ref[VLLMEngine] | None = None


def _shut_down_the_last_one(new: VLLMEngine) -> None:
    """Process-wide state goes with an engine of vLLM's whenever it is collected: so before the next one needs it."""
    global _last
    engine = None if _last is None else _last()
    if engine is not None and engine._open is not None:
        engine._open.llm_engine.engine_core.shutdown()
        engine._open = None
    gc.collect()  # vLLM's engines are cycles
    _last = weakref.ref(new)


def _completion(output: Any, sampling: SamplingParams) -> Completion:
    ids = list(output.token_ids)
    logprobs = [by_id[token].logprob for token, by_id in zip(ids, output.logprobs, strict=True)]
    whole = not sampling.truncates or (sampling.greedy and sampling.temperature == 1)
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave a completion up: {output.finish_reason}")
    return Completion(ids, logprobs if whole else [math.nan] * len(ids), None, output.finish_reason)


def _longest(prompt: int | None, new: int, context: int | None) -> int:
    """Tokens of the longest sequence."""
    if prompt is None:
        return context or _USUAL_PROMPT + new
    return min(prompt + new, context or prompt + new)


def _kv_bytes(model: nn.Module, config: RolloutConfig, longest: int, max_prompt_length: int | None) -> int:
    """What `rollout.kv_cache_memory` allows, else what the sequences of a step need that decode at a time."""
    if config.kv_cache_memory is not None:
        return parse_memory(config.kv_cache_memory, total_bytes(head(model).weight.device))
    of = causal_lm(model).config
    kv_heads = getattr(of, "num_key_value_heads", None) or of.num_attention_heads
    of_token = len(decoder_layers(model)) * token_bytes(kv_heads, head_dim(of), head(model).weight.itemsize, fp8=False)
    slots = min(config.max_batch_size, config.prompts_per_step * config.num_generations)
    usual = longest if max_prompt_length is not None else min(longest, _USUAL_PROMPT + config.max_completion_length)
    blocks = max(slots * math.ceil(usual / _BLOCK), math.ceil(longest / _BLOCK)) + 1  # and vLLM's empty one
    return blocks * _BLOCK * of_token


def _rank(factors: Factors) -> int:
    """The smallest that vLLM has buffers for. ValueError: there is none."""
    allowed: tuple[int, ...] = get_args(import_module("vllm.config.lora").MaxLoRARanks)
    rank = max(len(a) for a, _ in factors.values())
    if rank > max(allowed):
        raise ValueError(f'rollout.engine = "vllm" takes adapters of rank {max(allowed)} at most, not {rank}')
    return min(size for size in allowed if size >= rank)


@contextmanager
def _in_this_process() -> Generator[None]:
    """VLLM reads these when it is imported and when an engine is made; a level that the user has set stays."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before

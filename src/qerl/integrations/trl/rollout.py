"""qerl's engine as the rollout function of TRL's GRPOTrainer.

    GRPOTrainer(model=..., rollout_func=EngineRollout(noise={"sigma_start": 1e-2}), ...)

    prompts -> TRL's own tokens -> one Request for equal neighbours -> Engine.sync(noise) -> Engine.generate
            -> prompt_ids, completion_ids, logprobs -> TRL's rewards, advantages and loss

The engine reads the weights that the trainer trains, packed ones (integrations/transformers.py) as they are; adapters
are those of PEFT. It is built when the first completions are asked for, and gives its memory back after each rollout.

TRL weighs tokens by exp(old - sampled log-probability), cut by its `vllm_importance_sampling_*` settings, for vLLM's
completions only, although it takes log-probabilities from a rollout function. So the trainer's `use_vllm` is set, once
there are some: from there on TRL recomputes the clean log-probabilities, weighs, and logs the ratios, as for vLLM.
What else TRL would ask of vLLM is `sync_weights` before a rollout, which is this object's, and has nothing to do.

Sampling (temperature, length) is the trainer's; engine and noise have the settings of `[rollout]` and `[noise]`. A step
of the schedule is an optimizer step, as in callback.py, and evaluation is clean. Refused: what the engine does not
compute (penalties, tools, images) or the weights would not undo (a truncated distribution), and sharded weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import metadata
from itertools import groupby
from typing import Any

from packaging.specifiers import SpecifierSet

from qerl import philox
from qerl.config import RolloutConfig, validate
from qerl.engine import Engine, SyncReport, build_engine
from qerl.integrations.trl.callback import NormPlace, find_norms, stand_ins
from qerl.noise import NoiseDraw, build_controller, relative_noise
from qerl.types import Request, SamplingParams

ROLLOUT_VERSIONS = ">=1.16,<1.17"
"""Versions of TRL that weigh tokens as the module's text has it; others are refused."""

_THE_TRAINERS = {
    "temperature", "top_p", "top_k", "min_p", "max_completion_length", "num_generations", "prompts_per_step",
}  # fmt: skip
logger = logging.getLogger(__name__)

_SAMPLING_KEY = 0x74726C  # "trl": no sampling key is one of qerl's own trainer


class EngineRollout:
    """A `rollout_func`; see the module's text.

    noise: settings of `[noise]`, all but those of controllers; {"enabled": False} for none. rollout: those of
    `[rollout]` that belong to the engine, such as {"kv_cache_memory": "40%"}. ValueError for settings that do not fit
    together or are the trainer's and, at the first rollout, for a trainer or a model that it cannot sample for.
    """

    def __init__(self, *, noise: Mapping[str, Any] | None = None, rollout: Mapping[str, Any] | None = None) -> None:
        if theirs := sorted(_THE_TRAINERS & set(rollout or {})):
            raise ValueError(f"EngineRollout: {', '.join(theirs)} is the trainer's: set it in GRPOConfig")
        config = validate({"noise": dict(noise or {}), "rollout": dict(rollout or {})})
        if config.rollout.engine == "vllm":
            raise ValueError("EngineRollout: TRL has vLLM itself: use_vllm=True, and AQNCallback(trainer=trainer)")
        if config.noise.controller != "schedule" or config.noise.same_noise_in_training:
            raise ValueError(
                "EngineRollout: TRL trains without noise and measures nothing for a controller: leave out "
                "noise.controller and noise.same_noise_in_training"
            )
        self.config = config
        self.engine: Engine | None = None
        """From the first rollout on."""
        self._trainer: Any = None
        self._places: list[NormPlace] = []
        self._sampling = SamplingParams()
        self._rollout: tuple[int, bool] = (-1, False)  # optimizer step, and whether for training
        self._rollouts_of_step = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Completions of a trainer's prompts: one for each, equal neighbours being one group."""
        engine = self._engine_for(trainer)
        key = (trainer.state.global_step, bool(trainer.model.training))
        self._rollouts_of_step = self._rollouts_of_step + 1 if key == self._rollout else 0
        self._rollout = key
        draw = self._draw()
        prompt_ids: list[list[int]] = trainer._tokenize_prompts(list(prompts))[0]
        requests = self._requests(prompt_ids)
        try:
            engine.wake()
            # The slow engine runs the model's own norms, which need a place for noise.
            with nullcontext() if draw is None else stand_ins(self._places):
                self._log(draw, engine.sync(draw))
                groups = engine.generate(requests, self._sampling)
        finally:
            engine.sleep()
        if trainer.vllm_importance_sampling_correction and not trainer.use_vllm:
            trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, self, -1
        completions = [completion for group in groups for completion in group]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.logprobs for completion in completions],
        }

    def sync_weights(self) -> None:
        """TRL calls it when the weights have changed; the engine takes them over in every rollout."""

    def _engine_for(self, trainer: Any) -> Engine:
        if self.engine is not None and trainer is self._trainer:
            return self.engine
        _check(trainer)
        mode = trainer.vllm_importance_sampling_mode
        if trainer.vllm_importance_sampling_correction and self.config.noise.enabled and mode.startswith("sequence"):
            logger.warning(
                "EngineRollout: vllm_importance_sampling_mode = %r weighs a completion by the product of its tokens' "
                "ratios, which noise drives to 0 or beyond the cut: take 'token_truncate'",
                mode,
            )
        settings = self.config.rollout.model_dump() | {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": trainer.top_k or 0,
            "min_p": trainer.min_p or 0.0,
            "max_completion_length": trainer.max_completion_length,
        }
        rollout = RolloutConfig.model_validate(settings)
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
        self._places = find_norms(trainer.model) if self.config.noise.enabled else []
        self.engine = build_engine(trainer.model, eos_ids=trainer.eos_token_ids, config=rollout)
        self._trainer = trainer
        return self.engine

    def _draw(self) -> NoiseDraw | None:
        """The noise of a rollout; none in evaluation."""
        (step, training), noise, trainer = self._rollout, self.config.noise, self._trainer
        if not training or not noise.enabled:
            return None
        sigma = build_controller(noise, trainer.state.max_steps).sigma(step)  # a schedule, which keeps no state
        return NoiseDraw(self._seed(), step, sigma, noise.per)

    def _seed(self) -> int:
        """Of one rollout: no two of a step, or of two processes, share noise or keys."""
        return philox.fold(self._trainer.args.seed, self._trainer.args.process_index, self._rollouts_of_step)

    def _requests(self, prompt_ids: Sequence[list[int]]) -> list[Request]:
        step, training = self._rollout
        key = philox.fold(_SAMPLING_KEY, self._seed(), step, training)
        groups = [(ids, len(list(same))) for ids, same in groupby(prompt_ids)]
        return [
            Request(
                prompt_ids=list(ids),
                seeds=[philox.fold(key, number, sample) for sample in range(count)],
                max_new_tokens=self._trainer.max_completion_length,
                prompt_index=number,
            )
            for number, (ids, count) in enumerate(groups)
        ]

    def _log(self, draw: NoiseDraw | None, report: SyncReport) -> None:
        """Noise among TRL's own metrics of the step, by the names of qerl/metrics.py."""
        if draw is None:
            return
        metrics = self._trainer._metrics["train"]
        metrics["noise/sigma"].append(draw.sigma)
        metrics["noise/vectors"].append(report.num_noised_vectors)
        metrics["noise/relative"].append(relative_noise(self._trainer.model, draw))


def _check(trainer: Any) -> None:
    """ValueError for a trainer whose completions this engine cannot make, or whose loss would not weigh them."""
    args = trainer.args
    if metadata.version("trl") not in SpecifierSet(ROLLOUT_VERSIONS):
        raise ValueError(f"EngineRollout needs trl{ROLLOUT_VERSIONS}, and this is {metadata.version('trl')}")
    by_sequence = trainer.vllm_importance_sampling_mode.startswith("sequence")
    truncated = trainer.top_p < 1 or trainer.top_k or trainer.min_p
    refused = {
        "use_vllm": args.use_vllm and "completions come from qerl's engine: turn it off",
        "tools": (trainer.tools or trainer.environment_factories) and "the engine samples a single turn",
        "images": trainer._is_vlm and "the engine runs text decoders",
        "FSDP or DeepSpeed": (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
        and "the engine reads whole weights",
        "repetition_penalty": trainer.repetition_penalty != 1 and "the engine has none: set it to 1.0",
        "generation_kwargs": args.generation_kwargs and "they are for other engines: leave them out",
        "max_completion_length=None": trainer.max_completion_length is None and "the engine needs a length",
        f"temperature={trainer.temperature}": trainer.temperature <= 0 and "the engine divides by it",
        'loss_type="vespo"': trainer.loss_type == "vespo"
        and trainer.vllm_importance_sampling_correction
        and by_sequence
        and 'it needs vllm_importance_sampling_mode="token_truncate" or "token_mask"',
        "top_p, top_k or min_p": truncated
        and trainer.vllm_importance_sampling_correction
        and "log-probabilities are those before truncation: leave it out, or set "
        "vllm_importance_sampling_correction=False",
    }
    for setting, why in refused.items():
        if why:
            raise ValueError(f"EngineRollout with {setting}: {why}")

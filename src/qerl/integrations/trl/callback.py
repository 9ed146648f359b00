"""Adaptive quantization noise for TRL's trainers: one callback, nothing patched in TRL.

    GRPOTrainer(model=..., reward_funcs=..., callbacks=[AQNCallback(sigma_start=1e-2, sigma_end=5e-4)], ...)
    trainer.add_callback(AQNCallback(sigma_start=1e-2, sigma_end=5e-4, trainer=trainer))       with use_vllm

    on_train_begin   find the norms, or say why there are none; wrap this model's, or vLLM's, `generate`
    on_step_begin    sigma of the optimizer step                                            noise.py: NoiseSchedule
    generate         in the norms' places stand (w + Z) * x / rms(x); afterwards the norms stand there again
                     vLLM's own norms hold w + Z, rounded to their dtype; afterwards w again         vllm.py
    on_step_end      no noise until the next step: evaluation and other callbacks sample clean
    on_log           noise/sigma, noise/vectors and noise/relative among the logs
    on_train_end     `generate` is the model's own again

The model's norms (SITE_NAMES of noise.py, PEFT-wrapped model or not) are never written: stand-ins hold an fp32 copy of
w, and Z is a function of (seed, step, site, stream), so that a resumed run goes on with the same noise. Where AWQ has
divided w by s, by the folder that the model was loaded from, Z is as well. Scoring, training and whatever reads
parameters (`merge_adapter`, checkpoints, the weights for vLLM) run between generations and meet the clean modules.

A step here is an optimizer step. TRL may generate less often (`num_iterations`, `steps_per_generation`): a rollout has
the sigma of the step that begins with it; or several times in one step: the n-th generation draws from stream n. Noise
is drawn once a generation, which is `per = "rollout"`; processes that sample different data draw different noise.

TRL has no log-probabilities of what transformers sampled, so its loss takes the noisy completions for the clean
policy's own: there is no importance correction (with vLLM there is TRL's; rollout.py has it, too). Left out, and
refused: completions that come from elsewhere (continuous batching, a rollout function), Liger's norms. Source: QeRL,
arXiv 2510.11696, section 3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qerl import philox
from qerl.config import validate
from qerl.engine.vllm.norms import lost_warning
from qerl.formats.folding import Fold, read_folds
from qerl.integrations.trl.vllm import Sampler, find_sampler
from qerl.nn.architecture import rms_norm_eps
from qerl.nn.rmsnorm import RMSNorm
from qerl.nn.structure import causal_lm, decoder_layers
from qerl.noise import (
    SITE_NAMES,
    NoiseController,
    NoiseDraw,
    applied,
    build_controller,
    norm_fold,
    relative_noise,
    running_norm,
)

TRL_VERSIONS = ">=1.0,!=1.15.0,<1.17"
"""What the tests were run against; another version gets a warning."""

# Settings of a trainer under which completions or norms are not transformers' own, and what is then the case.
_REFUSED = {
    "use_transformers_continuous_batching": "completions do not come from model.generate",
    "use_liger_kernel": "the norms are Liger's kernels",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NormPlace:
    """Where a noisy norm is: the attribute `name` of a decoder layer."""

    layer: nn.Module
    name: str
    eps: float


class AQNCallback(TrainerCallback):
    """Noise on the RMSNorm weights while a TRL trainer samples; settings and schedule are those of `[noise]`.

    sigma_start, sigma_end: sigma of stage 1 and of the last stage; num_stages: equal intervals of the run's optimizer
    steps, the first of which has no noise; schedule, paper_exponent: see docs/noise.md. ValueError for settings that
    do not fit together; when training begins, for a model without such norms, or a trainer that samples elsewhere.
    trainer: needed where it has `use_vllm`, since a callback is told of the model alone.
    """

    def __init__(
        self,
        sigma_start: float = 1e-2,
        sigma_end: float = 5e-4,
        num_stages: int = 10,
        *,
        schedule: str = "exponential",
        paper_exponent: bool = False,
        trainer: Any = None,
    ) -> None:
        settings = {
            "sigma_start": sigma_start,
            "sigma_end": sigma_end,
            "num_stages": num_stages,
            "schedule": schedule,
            "paper_exponent": paper_exponent,
        }
        self.config = validate({"noise": settings}).noise
        self.metrics: dict[str, float] = {}
        """Of the last rollout, by the names of qerl/metrics.py."""
        self._trainer = trainer
        self._sampler: Sampler | None = None  # where it is not the model
        self._model: PreTrainedModel | None = None
        self._owner: Any = None  # of the `generate` that is wrapped
        self._generate_before: Callable[..., Any] | None = None  # of the object; its class has the usual one
        self._told_lost = False
        self._places: list[NormPlace] = []
        self._controller: NoiseController | None = None
        self._seed = 0
        self._draw: NoiseDraw | None = None  # of the step that is under way
        self._generations_of_step = 0
        self._generations = 0
        self._steps = 0

    # ------------------------------------------------------------------ the trainer's events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check everything, then wrap `generate`."""
        self.remove()
        for setting, why in _REFUSED.items():
            if getattr(args, setting, False):
                raise ValueError(f"AQNCallback works on transformers' generate, and with {setting} {why}: turn it off")
        _check_version()
        self._places = find_norms(kwargs["model"])
        self._controller = build_controller(self.config, state.max_steps)
        self._generations = self._steps = 0
        self._model, group = causal_lm(kwargs["model"]), args.process_index
        if not getattr(args, "use_vllm", False):
            self._owner = self._model
        elif (sampler := self._find_sampler()) is not None:
            self._sampler, self._owner, group = sampler, sampler.owner, sampler.group
        else:  # another process samples
            return
        self._seed = philox.fold(args.seed, group)
        self._generate_before = vars(self._owner).get("generate")
        vars(self._owner)["generate"] = self._wrapped(self._owner.generate)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sigma of the step whose rollout may come now."""
        assert self._controller is not None, "training has begun"
        self._draw = NoiseDraw(self._seed, state.global_step, self._controller.sigma(state.global_step))
        self._generations_of_step = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """No noise until the next step. ValueError when the first rollout did not come through `generate`."""
        self._draw = None
        self._steps += 1
        micro_steps_of_rollout = getattr(args, "steps_per_generation", 1) * getattr(args, "num_iterations", 1)
        sampled = self._owner is None or self._generations > 0
        if not sampled and self._steps * args.gradient_accumulation_steps >= micro_steps_of_rollout:
            raise ValueError(
                "AQNCallback: the first rollout came without model.generate (from a rollout function?), so there was "
                "no noise and would never be: take the callback out, or sample with transformers or vLLM"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the rollout's noise to the training logs: for callbacks that come later, and trainer_state.json."""
        if logs is not None and "loss" in logs:
            logs.update(self.metrics)
            state.log_history[-1].update(self.metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was found."""
        self.remove()

    def remove(self) -> None:
        """Give the model its own `generate` back. A run that ends calls it; after one that was interrupted, you may."""
        if self._owner is not None and self._generate_before is None:
            del vars(self._owner)["generate"]
        elif self._owner is not None:
            vars(self._owner)["generate"] = self._generate_before
        self._model = self._owner = self._sampler = self._draw = None

    # ------------------------------------------------------------------ the noise

    def _wrapped(self, generate: Any) -> Callable[..., Any]:
        def noisy_generate(*args: Any, **kwargs: Any) -> Any:
            with self._noise():
                return generate(*args, **kwargs)

        return noisy_generate

    @contextmanager
    def _noise(self) -> Generator[None]:
        """Noise for one generation; none outside a step, and none in evaluation."""
        model, draw = self._model, self._draw
        if model is None or draw is None or not model.training:
            yield
            return
        stream = self._generations_of_step
        self._generations_of_step += 1
        self._generations += 1
        self.metrics = {"noise/sigma": draw.sigma, "noise/vectors": 0, "noise/relative": 0.0}
        if draw.sigma == 0:
            yield
            return
        self.metrics["noise/vectors"] = len(self._places)
        with stand_ins(self._places):
            self.metrics["noise/relative"] = relative_noise(model, draw, stream)
            if self._sampler is None:
                with applied(model, draw, (stream,)):
                    yield
                return
        with self._noise_in_vllm(self._sampler, draw, stream):
            yield

    @contextmanager
    def _noise_in_vllm(self, sampler: Sampler, draw: NoiseDraw, stream: int) -> Generator[None]:
        try:
            noise = sampler.add_noise(draw, stream)
            if noise["vectors"] != len(self._places):
                raise RuntimeError(
                    f"AQNCallback: {noise['vectors']:.0f} norms of vLLM's model took noise, and the trainer's has "
                    f"{len(self._places)}"
                )
            if not self._told_lost and (warning := lost_warning(draw.sigma, noise["lost"])):
                self._told_lost = True
                logger.warning("AQNCallback: %s", warning)
            yield
        finally:
            sampler.remove_noise()

    def _find_sampler(self) -> Sampler | None:
        if self._trainer is None:
            raise ValueError(
                "AQNCallback with use_vllm: the noise goes onto vLLM's norms, and the way there is the trainer's: "
                "trainer.add_callback(AQNCallback(..., trainer=trainer))"
            )
        return find_sampler(self._trainer)


def find_norms(model: nn.Module) -> list[NormPlace]:
    """The noisy norms in the order of noise.py's sites; those that AWQ has folded factors into get them as `fold`.

    ValueError, naming the patterns, where one is missing; where the folder's factors are not this model's.
    """
    layers = decoder_layers(model)
    folder = causal_lm(model).name_or_path
    folds = read_folds(Path(folder)) if folder else {}
    stack = next(name for name, module in causal_lm(model).named_modules() if module is layers)
    patterns = " and ".join(f"{stack}.*.{name}" for name in SITE_NAMES)
    places: list[NormPlace] = []
    for number, layer in enumerate(layers):
        for name in SITE_NAMES:
            norm = running_norm(getattr(layer, name, None))
            eps = None if norm is None else rms_norm_eps(norm)
            if norm is None:
                found = "there is none"
            elif eps is None:
                found = f"it is a {type(norm).__name__}, which is not w * x / rms(x)"
            elif hasattr(layer, "pre_feedforward_layernorm"):
                found = "it is not the norm before gate and up, since there is a pre_feedforward_layernorm"
            else:
                factors = folds.get(f"{stack}.{number}.{name}", Fold()).outputs
                if factors is not None and factors.shape != norm.weight.shape:
                    raise ValueError(f"{folder} has factors of another model for {stack}.{number}.{name}")
                norm.register_buffer("fold", None if factors is None else factors.to(norm.weight.device), False)
                places.append(NormPlace(layer, name, eps))
                continue
            raise ValueError(
                f"the noise goes on {patterns} of {type(causal_lm(model)).__name__}; at "
                f"{stack}.{number}.{name} {found}: this architecture takes no noise"
            )
    return places


@contextmanager
def stand_ins(places: list[NormPlace]) -> Generator[None]:
    """Put a norm that takes noise in each place; on leaving, however that happens, the modules are back, untouched."""
    aside = [getattr(place.layer, place.name) for place in places]
    try:
        for place, module in zip(places, aside, strict=True):
            running = running_norm(module)
            norm = RMSNorm(running.weight, place.eps)
            norm.fold = norm_fold(running)
            setattr(place.layer, place.name, norm)
        yield
    finally:
        for place, module in zip(places, aside, strict=True):
            setattr(place.layer, place.name, module)


def _check_version() -> None:
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:  # a trainer of transformers that is not TRL's
        return
    if version not in SpecifierSet(TRL_VERSIONS):
        logger.warning("AQNCallback was tested with trl%s, and this is %s", TRL_VERSIONS, version)

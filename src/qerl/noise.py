"""Adaptive Quantization Noise (AQN): what sigma is, where the noise comes from, and where it goes. All of it.

In every decoder layer two norms are noisy, the one before q, k, v and the one before gate, up (never the final norm,
q_norm or k_norm):

    y = (w + Z) * x / rms(x),    Z ~ N(0, sigma^2 I), fp32

which equals scaling the input channels of the weights that follow (adapters included) by 1 + Z/w. It costs no memory
and no kernel. w itself is never written: `applied` hands Z to the norms and takes it back, so the clean weights stay
as they are, bit for bit. Of a norm whose weight a calibration has divided by s (formats/folding.py), w above is what it
was before: w / s stands for it, and takes Z / s (`site_rows`).

    controller.sigma(rollout) -> NoiseDraw(seed, step, sigma, per) -> draw.rows(site, streams, size) = sigma * Z
        engine/     writes clean + Z into its own norm buffers                     (rollouts)
        rl/update   with applied(model, draw, streams, index): forward, backward   (if training uses the same noise)

Z is a function of (seed, step, site, stream) through philox.py, so nothing is stored and anyone can recompute it. A
stream says who shares a Z:

    per          prompt tokens        completion tokens          number of draws
    rollout      ROLLOUT_STREAM       ROLLOUT_STREAM             one
    prompt       prompt_stream(p)     prompt_stream(p)           one a prompt
    completion   prompt_stream(p)     completion_stream(p, s)    one a prompt and one a completion

With one draw a completion the prompt still runs under its group's Z, so that its KV pages can be shared. The hidden
state of a prompt's last token, which predicts the first completion token, is under the prompt's Z. Ranks that sample
different data fold their rank into `seed`; ranks that split one model do not.

Used by engine/, nn/ and rl/; imports none of them. Source: QeRL, arXiv 2510.11696, section 3.3; feedback control of
sigma as in "Parameter space noise for exploration", arXiv 1706.01905. Left out: layers whose norms are arranged
otherwise (Gemma 2 has four a layer); they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from qerl import philox
from qerl.config import NoiseConfig, NoisePer

SITE_NAMES = ("input_layernorm", "post_attention_layernorm")
"""The noisy norms of a decoder layer, in the order of their site numbers: layer i has sites 2 i and 2 i + 1."""

_KEY_DOMAIN = 0x41514E  # "AQN": noise keys never meet the sampler's

# ---------------------------------------------------------------------------------------------------------------- draws

ROLLOUT_STREAM = 0


def prompt_stream(prompt: int) -> int:
    """Stream of a prompt, by its number within the step; resampling rounds count on."""
    return (prompt + 1) << 32


def completion_stream(prompt: int, sample: int) -> int:
    """Stream of one completion of a prompt."""
    return (prompt + 1) << 32 | (sample + 1)


# PAPER: section 3.3 derives noise on the norm from noise on the weights, W + Z. The two are not equal: what runs is the
# norm form, w + Z, whose effect on the weights is a factor 1 + Z/w for each input channel, on adapters too.
@dataclass(frozen=True, slots=True, eq=False)
class NoiseRows:
    """What a norm adds to its weight: one row a stream, and each token's row."""

    rows: Float32[Tensor, "streams size"]
    """sigma * Z."""
    index: Int64[Tensor, " tokens"] | None
    """Row of each token; None: `rows` has a single row, for every token."""


@dataclass(frozen=True, slots=True)
class NoiseDraw:
    """All noise of one step: nothing is drawn until `rows` is called."""

    seed: int
    """The run's seed (with the rank folded in, where ranks sample different data)."""
    step: int
    """The rollout that the noise belongs to, counted over the whole run."""
    sigma: float
    """Standard deviation of Z; 0 is no noise."""
    # PAPER: a new Z each forward pass in section 3.3, each step in algorithm 1, each rollout in the published code.
    per: NoisePer = "rollout"
    """Who shares a Z; see the module docstring."""

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"noise sigma must be a finite number of at least 0, got {self.sigma}")

    def stream(self, prompt: int, sample: int | None = None) -> int:
        """Stream of a prompt's tokens or, with `sample`, of that completion's tokens."""
        if self.per == "rollout":
            return ROLLOUT_STREAM
        if self.per == "prompt" or sample is None:
            return prompt_stream(prompt)
        return completion_stream(prompt, sample)

    def rows(
        self, site: Int64[Tensor, " streams"] | int, streams: Int64[Tensor, " streams"], size: int
    ) -> Float32[Tensor, "streams size"]:
        """sigma * Z of one norm, or of a norm for each stream. A row depends on its own stream and norm alone."""
        if self.sigma == 0:
            return torch.zeros(len(streams), size, device=streams.device)
        key = philox.fold(_KEY_DOMAIN, self.seed, self.step)
        return philox.normal(key, streams, size, site=site).mul_(self.sigma)


# ---------------------------------------------------------------------------------------------------------- application


@runtime_checkable  # for the run-time type checks of the tests
class NoiseSite(Protocol):
    """A norm that takes noise: `nn.RMSNorm`, or anything with the same two attributes."""

    weight: nn.Parameter
    """[size]: the clean weight."""
    noise: NoiseRows | None
    """Added to `weight` in fp32 in the forward pass; None: clean."""


def noise_sites(model: nn.Module) -> list[NoiseSite]:
    """The noisy norms of a decoder model, PEFT-wrapped or not: for each layer, in order, the two of SITE_NAMES.

    A norm that PEFT trains is wrapped in copies: the site is the one that runs. ValueError where a layer lacks one of
    the two names, or where a norm has no `.noise` (it was not converted by `nn`): noise that touches nothing is an
    error.
    """
    layers = _decoder_layers(model)
    return [_site(layer, f"layers.{i}", name) for i, layer in enumerate(layers) for name in SITE_NAMES]


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    base = _call_if_present(model, "get_base_model")  # PEFT's
    layers = getattr(_call_if_present(base, "get_decoder"), "layers", None)  # transformers'
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ValueError(
            f"noise: {type(base).__name__} has no decoder with a module list `layers`, where "
            f"{' and '.join(SITE_NAMES)} are looked for; set noise.enabled = false to train it without noise"
        )
    return list(layers)


def _call_if_present(model: nn.Module, method: str) -> nn.Module:
    return getattr(model, method, lambda: model)()


def _site(layer: nn.Module, place: str, name: str) -> NoiseSite:
    if hasattr(layer, "pre_feedforward_layernorm"):
        raise ValueError(
            f"noise: {place} has a pre_feedforward_layernorm, so its post_attention_layernorm is not the norm before "
            "gate and up; this architecture is not supported: set noise.enabled = false"
        )
    norm = running_norm(getattr(layer, name, None))
    if norm is None:
        raise ValueError(f"noise: {place} has no {name}; set noise.enabled = false to train this architecture")
    if not (hasattr(norm, "weight") and hasattr(norm, "noise")):
        raise ValueError(
            f"noise: {place}.{name} is a {type(norm).__name__} without a `.noise` slot: load the model with "
            "qerl.nn.load.load_model, which puts qerl's RMSNorm in its place"
        )
    return norm


_ROWS_AT_ONCE = 128
"""Rows drawn by the same launches, a hundred or two: with 5,120 numbers each, they need 8 MB besides themselves."""


def site_rows(
    draw: NoiseDraw, sites: Sequence[NoiseSite], streams: Int64[Tensor, " streams"]
) -> Float32[Tensor, "sites streams size"]:
    """What is added to each site's weight: sigma * Z or, where the weight has been divided by s, sigma * Z / s.

    sites: all of a model, in order, on the device of `streams`.
    """
    (size,) = {site.weight.numel() for site in sites}
    return folded_rows(draw, [norm_fold(site) for site in sites], streams, size)


def folded_rows(
    draw: NoiseDraw, folds: Sequence[Float32[Tensor, " size"] | None], streams: Int64[Tensor, " streams"], size: int
) -> Float32[Tensor, "sites streams size"]:
    """`site_rows` for norms that are not this package's: `folds` has s of each site, in order, None where it is 1."""
    at_once = max(1, _ROWS_AT_ONCE // len(streams))
    turns = [
        torch.arange(i, min(i + at_once, len(folds)), device=streams.device) for i in range(0, len(folds), at_once)
    ]
    drawn = [draw.rows(n.repeat_interleave(len(streams)), streams.repeat(len(n)), size) for n in turns]
    rows = torch.cat(drawn).view(len(folds), len(streams), size)
    for of_site, fold in zip(rows, folds, strict=True):
        if fold is not None:
            of_site /= fold
    return rows


def norm_fold(norm: Any) -> Float32[Tensor, " size"] | None:
    """The factors that a norm's weight has been divided by; None where it has not."""
    return getattr(norm, "fold", None)


def running_norm(norm: Any) -> Any:
    """The norm that runs: the norm itself or, of one that PEFT trains and saves whole, the active copy in its wrapper.

    The one rule for whoever reads or noises a norm, so that engine and trainer never mean different copies.
    """
    if not hasattr(norm, "modules_to_save"):
        return norm
    frozen = norm.disable_adapters or not norm.active_adapters
    return norm.original_module if frozen else norm.modules_to_save[norm.active_adapters[0]]


@contextmanager
def applied(
    model: nn.Module,
    draw: NoiseDraw | None,
    streams: Sequence[int] | Int64[Tensor, " streams"] = (ROLLOUT_STREAM,),
    index: Int64[Tensor, " tokens"] | None = None,
) -> Generator[None]:
    """Run the model's norms under noise; on leaving, however that happens, they are clean again.

    Hold it around forward *and* backward: activation checkpointing runs the forward again and must see the same Z.
    streams: who draws; index: each token's place in `streams`, needed when there is more than one. `draw` None is a
    clean pass. ValueError inside another `applied`.
    """
    if draw is None:
        yield
        return
    if len(streams) != 1 and index is None:
        raise ValueError(f"noise: {len(streams)} streams need an index that names each token's stream")
    sites = noise_sites(model)
    if any(site.noise is not None for site in sites):
        raise ValueError("noise is applied already: leave that `with applied(...)` first")
    if draw.sigma == 0:
        yield
        return
    try:
        on_device = torch.as_tensor(streams, dtype=torch.int64, device=sites[0].weight.device)
        for site, rows in zip(sites, site_rows(draw, sites, on_device), strict=True):
            site.noise = NoiseRows(rows, index)
        yield
    finally:
        for site in sites:
            site.noise = None


# ----------------------------------------------------------------------------------------------------- sigma over a run

ScheduleKind = Literal["exponential", "linear", "cosine", "logarithmic"]


class Observation(NamedTuple):
    """What a finished rollout showed; NaN where it could not be measured."""

    mismatch_kl: float
    """KL(noisy rollout policy || clean policy), nats a token: the metric of that name (rl/loss.py)."""
    entropy: float
    """Of the rollout policy, nats a token."""
    reward_std: float
    """Mean over groups of the standard deviation of a group's rewards."""


@runtime_checkable
class NoiseController(Protocol):
    """Says sigma of each rollout. Its state is part of a checkpoint."""

    def sigma(self, rollout: int) -> float:
        """Sigma of a rollout, counted from 0 over the whole run."""
        ...

    def observe(self, seen: Observation) -> None:
        """Called once after each rollout."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on as if unbroken."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError for the state of another kind of controller."""
        ...


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """Sigma by stage: no noise in stage 0, then a decay from `start` to `end` over stages 1 .. K-1.

    stage = min(K-1, floor(rollout * K / total)). With i = stage - 1 and t = i / (K-2):

        exponential   s (e/s)^t                       paper_exponent: s (e/s)^(i/(K-1)), which never reaches e
        linear        s + (e-s) t
        cosine        e + (s-e) (1 + cos(pi t)) / 2
        logarithmic   s + (e-s) ln(1+i) / ln(K-1)

    K = 2 has the single value s in stage 1.
    """

    kind: ScheduleKind
    start: float
    end: float
    num_stages: int
    """K."""
    total_rollouts: int
    """Of the whole run, all epochs."""
    paper_exponent: bool = False

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise ValueError(f"noise.num_stages must be at least 2 (stage 0 has no noise), got {self.num_stages}")
        if self.total_rollouts < 1:
            raise ValueError(f"a noise schedule needs at least one rollout, got {self.total_rollouts}")

    def stage(self, rollout: int) -> int:
        """The stage of a rollout, counted from 0; rollouts past the end stay in the last."""
        # PAPER: stages are counted over the whole run; the published code starts over with each epoch.
        return min(self.num_stages - 1, rollout * self.num_stages // self.total_rollouts)

    def sigma(self, rollout: int) -> float:
        """Sigma of a rollout's stage."""
        stage, s, e = self.stage(rollout), self.start, self.end
        if stage == 0:
            return 0.0
        i, last = stage - 1, self.num_stages - 2
        if last == 0 or s == e:
            return s
        if self.kind == "exponential":
            # PAPER: section 3.3 divides by K-1, so that the last stage stays above sigma_end; K-2 reaches it.
            return s * (e / s) ** (i / (last + 1 if self.paper_exponent else last))
        if self.kind == "linear":
            return s + (e - s) * i / last
        if self.kind == "cosine":
            return e + (s - e) * (1 + math.cos(math.pi * i / last)) / 2
        return s + (e - s) * math.log(1 + i) / math.log(1 + last)

    def observe(self, seen: Observation) -> None:
        """A schedule follows nothing."""

    def state_dict(self) -> dict[str, Any]:
        """A schedule is a function of the rollout's number: only its name is kept."""
        return {"controller": "schedule"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError for the state of another kind of controller."""
        _same_controller(state, "schedule")


MAX_OVER_START = 10.0
"""A feedback controller's sigma stops at this many times its first value, should the target be out of reach."""


@dataclass(slots=True)
class FeedbackController:
    """Holds a measured quantity near a target: sigma *= factor while it is below, sigma /= factor while it is not.

    The law of arXiv 1706.01905, section 3, there for the distance between noisy and clean policy ("divergence" here).
    The other two assume that noise raises what they measure. Sigma stays in [smallest, MAX_OVER_START * start].
    """

    quantity: Literal["divergence", "entropy", "reward_variance"]
    """What is held: the mismatch KL, the rollout policy's entropy, or the rewards' spread within groups."""
    start: float
    smallest: float
    target: float
    factor: float

    _sigma: float = field(init=False)

    def __post_init__(self) -> None:
        self._sigma = self.start

    def sigma(self, rollout: int) -> float:
        """The present sigma, whatever the rollout's number."""
        return self._sigma

    def observe(self, seen: Observation) -> None:
        """Move sigma one factor up or down; a NaN moves nothing."""
        measured = {
            "divergence": seen.mismatch_kl,
            "entropy": seen.entropy,
            "reward_variance": seen.reward_std,
        }[self.quantity]
        if math.isnan(measured):
            return
        moved = self._sigma * self.factor if measured < self.target else self._sigma / self.factor
        self._sigma = min(max(moved, self.smallest), MAX_OVER_START * self.start)

    def state_dict(self) -> dict[str, Any]:
        """The present sigma."""
        return {"controller": self.quantity, "sigma": self._sigma}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError for the state of another kind of controller."""
        _same_controller(state, self.quantity)
        self._sigma = float(state["sigma"])


def _same_controller(state: dict[str, Any], name: str) -> None:
    if state.get("controller") != name:
        raise ValueError(
            f"the checkpoint's noise controller is {state.get('controller')!r} and noise.controller is {name!r}: "
            "resume with the checkpoint's"
        )


def build_controller(config: NoiseConfig, total_rollouts: int) -> NoiseController:
    """The controller that a config asks for; without noise, a schedule whose sigma is always 0."""
    if not config.enabled:
        return NoiseSchedule("linear", 0.0, 0.0, config.num_stages, total_rollouts)
    if config.controller == "schedule":
        return NoiseSchedule(
            config.schedule,
            config.sigma_start,
            config.sigma_end,
            config.num_stages,
            total_rollouts,
            config.paper_exponent,
        )
    return FeedbackController(config.controller, config.sigma_start, config.sigma_end, config.target, config.factor)


# -------------------------------------------------------------------------------------------------------------- monitor

MonitorAction = Literal["none", "warn", "disable_noise", "cut_lr", "rollback"]


def relative_noise(model: nn.Module, draw: NoiseDraw, stream: int = ROLLOUT_STREAM) -> float:
    """|Z| / |w| of a site, root mean square over all sites: how much of a norm's output is noise, 0.1 for a tenth.

    Not the mean of Z/w by channel: a few channels with w near 0, which hardly count in the output, would be all of it.
    """
    if draw.sigma == 0:
        return 0.0
    sites = noise_sites(model)
    weights: list[Tensor] = []
    for site in sites:
        weight, fold = site.weight.detach().float(), norm_fold(site)
        weights.append(weight if fold is None else weight * fold)
    whole = torch.stack(weights)
    z = folded_rows(draw, [None] * len(sites), torch.tensor([stream], device=whole.device), whole.shape[1])[:, 0]
    return (z.square().sum(1) / whole.square().sum(1)).mean().sqrt().item()


class NoiseMonitor:
    """Decides what happens when the noisy rollout policy drifts too far from the trained one.

    `judge` compares the mismatch KL with `divergence_limit` (a NaN is a divergence) and names the trainer's action:

        warn            log it
        disable_noise   sigma 0 from here on (`noise_disabled`, kept across a resume)
        cut_lr          halve the learning rate
        rollback        load the last good checkpoint but keep this monitor: noise is off from then on, since the same
                        keys would lead to the same place

    Once the noise is off it is not to blame: "disable_noise" and "rollback" become "warn".
    """

    def __init__(self, config: NoiseConfig) -> None:
        self.action: MonitorAction = "none" if config.on_divergence == "off" else config.on_divergence
        self.divergence_limit = config.divergence_limit
        self.noise_disabled = False

    def judge(self, mismatch_kl: float) -> MonitorAction:
        """What the trainer has to do after a rollout with this mismatch KL (nats a token)."""
        if mismatch_kl <= self.divergence_limit:
            return "none"
        if self.action not in ("disable_noise", "rollback"):
            return self.action
        if self.noise_disabled:
            return "warn"
        self.noise_disabled = True
        return self.action

    def state_dict(self) -> dict[str, Any]:
        """What survives a resume."""
        return {"noise_disabled": self.noise_disabled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.noise_disabled = bool(state["noise_disabled"])

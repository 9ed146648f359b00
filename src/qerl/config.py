"""The configuration of a run: one validated object, read from TOML, with `section.key=value` overrides.

Every field's docstring is its help text (docs/configuration.md is generated from them). Unknown keys are errors, rules
across fields are checked here, and nothing in this file needs torch, so that a mistake costs no model load.
Names are TRL's where the meaning is the same.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

NoisePer = Literal["rollout", "prompt", "completion"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
LossType = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]

GraderName = Literal["numeric", "math", "exact", "none"]
Percent = Literal["ignore", "fraction"]

# The formats that a setting of [model] belongs to.
_FORMATS_WITH = {
    "keep": ("nvfp4", "mxfp4", "nf4", "int4"),
    "scale": ("nvfp4", "mxfp4", "int4"),
    "double_quant": ("nf4",),
    "group_size": ("int4",),
    "symmetric": ("int4",),
}

# Settings of [rollout] that mean nothing to vLLM, and what to do.
_NOT_FOR_VLLM = {
    "batch_invariant": "leave it out",
    "head_format": "leave it out",
    "kv_cache_dtype": "leave it out",
    "kv_cache_tokens": "set rollout.kv_cache_memory",
}

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# What every reward function may be called with, beside the data's columns.
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state")


EMBEDDED = Path(__file__).resolve().parent / "embedded"
"""The small model that comes with the package."""

_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class ConfigError(ValueError):
    """A configuration that cannot run; the message names each place and its fix."""


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, assignments are validated, and no number is NaN or infinite.

    Types are strict, `steps = true` is no number, but an integer stands for a float: `alpha = 32`.
    """

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_assignment=True,
        validate_default=True,
        allow_inf_nan=False,
        strict=True,
    )


class ModelConfig(Section):
    """Which model, and how its frozen base is stored."""

    path: str = "embedded"
    """Folder of a transformers model in safetensors (bf16, or packed by `qerl quantize`), or "embedded": the small
    model in this package."""
    format: Literal["nvfp4", "mxfp4", "nf4", "int4", "bf16"] = "nvfp4"
    """Storage of the frozen linear layers. A bf16 folder is quantised while it loads; a packed folder must match."""
    scale: Literal["sweep", "amax"] = "sweep"
    """How a block's scale is chosen: least squares over the scales nearby, or from the block's largest value alone
    (nvfp4, int4: it lands on the largest code; mxfp4: the OCP specification's rule). nf4 has no choice."""
    double_quant: bool = True
    """nf4: quantise the blocks' largest values too, as QLoRA does: 4.13 bits a weight instead of 4.5."""
    group_size: Literal[32, 64, 128] = 128
    """int4: weights that share a scale."""
    symmetric: bool = False
    """int4: without zero points."""
    keep: list[str] = []
    """Glob patterns of linear layers that stay in bf16, such as "model.layers.0.*". The embedding and the head
    always do."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Activations: auto is bfloat16 on a GPU and float32 on a CPU."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:1"."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""

    @model_validator(mode="after")
    def _quantises_what_it_says(self) -> ModelConfig:
        for key, formats in _FORMATS_WITH.items():
            if self.format in formats or getattr(self, key) == ModelConfig.model_fields[key].default:
                continue
            if self.format == "bf16":
                raise ValueError(
                    f'model.{key} says how layers are quantised, and model.format = "bf16" quantises none: '
                    "take one of them out"
                )
            raise ValueError(
                f'model.{key} is a setting of {" and ".join(formats)}, and model.format = "{self.format}" has none: '
                "take one of them out"
            )
        return self

    def keeps(self, linear: str) -> bool:
        """Whether a linear layer stays as it is."""
        return any(fnmatchcase(linear, pattern) for pattern in self.keep)

    def check_keep(self, linears: Sequence[str], others: Sequence[str] = ()) -> None:
        """ValueError for a pattern of `keep` that matches neither the layers' linears nor others, such as the head."""
        for pattern in self.keep:
            if not any(fnmatchcase(name, pattern) for name in (*linears, *others)):
                raise ValueError(f"model.keep: {pattern!r} matches no linear layer; names look like {linears[0]}")


def model_folder(path: str) -> Path:
    """The folder that `path` names. ValueError: it is no transformers model's."""
    folder = EMBEDDED if path == "embedded" else Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path: {folder} is not the folder of a transformers model (it has no config.json): "
            "download one first (hf download OWNER/NAME --local-dir FOLDER), or use path = 'embedded'"
        )
    return folder


def matches_layer(pattern: str, name: str) -> bool:
    """Whether a pattern of `rank_pattern` or `alpha_pattern` is of a layer: PEFT's rule. re.error for what is none."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


class LoraConfig(Section):
    """The adapters: y = W x + scaling * B(A x)."""

    r: int = Field(default=32, ge=1, le=4096)
    """Rank."""
    alpha: float = Field(default=32, gt=0)
    """scaling = alpha / r (alpha / sqrt(r) with use_rslora)."""
    target_modules: list[str] = list(LORA_TARGETS)
    """Names of the linear layers that get an adapter."""
    use_rslora: bool = False
    """Rank-stabilised scaling, arXiv 2312.03732."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=4096)]] = {}
    """Ranks for layers whose name matches a pattern, as in PEFT."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Alphas for layers whose name matches a pattern, as in PEFT."""
    train_norms: bool = False
    """Train the RMSNorm weights too; they are saved with the adapter."""
    start_from: str | None = None
    """Folder of a LoRA adapter in PEFT's layout to start from, such as one of supervised fine-tuning; default: B = 0.
    It must have been made with the settings above. The reference of loss.beta stays the base without it."""

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _are_patterns(cls, patterns: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        for pattern in patterns:
            try:
                matches_layer(pattern, "")
            except re.error as error:
                raise ValueError(f"lora.{info.field_name}: {pattern!r} is no regular expression: {error}") from error
        return patterns

    def check_patterns(self, layers: Sequence[str]) -> None:
        """ValueError for a pattern that matches none of the adapted layers."""
        for section in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, section):
                if not any(matches_layer(pattern, layer) for layer in layers):
                    raise ValueError(
                        f"lora.{section}: {pattern!r} matches none of the adapted layers, such as {layers[0]}"
                    )

    @model_validator(mode="after")
    def _trains_something(self) -> LoraConfig:
        if not self.target_modules:
            raise ValueError(
                'lora.target_modules is empty: name at least one kind of layer, such as "q_proj"; norms are trained '
                "beside adapters, not alone"
            )
        return self


class TaskConfig(Section):
    """Where problems come from and how a prompt looks."""

    name: str = "arithmetic"
    """arithmetic, gsm8k, math, bigmath; math500, aime, amc (evaluation only); data (your own);
    reasoning_gym:NAME (needs `pip install qerl[reasoning-gym]`)."""
    path: str | None = None
    """Data: a JSONL, Parquet or CSV file, a folder with such files by split, a folder saved by `datasets`, or a name
    for `datasets.load_dataset`."""
    subset: str | None = None
    """Configuration of a named data set, such as "main"."""
    split: str = "train"
    """Split of `path` to train on; a single file is one split by itself."""
    eval_path: str | None = None
    """Held-out problems from elsewhere, in any form that `path` has."""
    eval_split: str | None = None
    """Split to hold out; default: test or validation where there is one, else a share of the training split."""
    held_out_share: float = Field(default=0.1, ge=0, lt=1)
    """That share, chosen by a hash of the prompt: the same in every run; 0 trains on all."""
    prompt_column: str = "prompt"
    """data: the column with the problem, plain text or chat messages."""
    answer_column: str = "answer"
    """data: the column with the reference; every column is handed to reward functions."""
    grader: GraderName | None = None
    """How an answer is compared, for tasks that read data; default: numeric for gsm8k, else math. none: data without
    references, paid by your own reward functions. arithmetic and reasoning_gym have their own and refuse it."""
    percent: Percent = "ignore"
    """What a percent sign means in answers and references: "ignore" (50% is written for 50) or "fraction" (0.5)."""
    levels: list[int] = []
    """math: keep these levels only (a row of "Level ?" has none); empty keeps all."""
    subjects: list[str] = []
    """math: keep these subjects only."""
    sources: list[str] = []
    """bigmath: keep problems of these sources only."""
    solve_rate: Annotated[tuple[float, float], Strict(False)] | None = None
    """bigmath: keep problems whose solve rate lies in this range, both ends included; rows without one are dropped."""
    options: dict[str, Any] = {}
    """reasoning_gym: arguments of its generator, such as {min_animals = 3}."""
    difficulty: int = Field(default=2, ge=1, le=5)
    """arithmetic: how long the sums are."""
    system_prompt: str | None = None
    """Replaces the task's own system message; "" leaves it out."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Prompts with more tokens are left out, counted, and reported."""


class RewardConfig(Section):
    """What a completion is paid for: sum of weight * function."""

    functions: list[str] = []
    """"module:function" or "file.py:function" in TRL's signature f(prompts, completions, **columns); empty: the
    task's own rewards."""
    weights: list[float] | None = None
    """One weight a function; default 1 each."""
    arguments: dict[str, dict[str, Any]] = {}
    """Fixed arguments by function name, such as {overlong_reward = {max_length = 512, buffer = 64}}."""
    timeout_s: float = Field(default=300, gt=0)
    """Longest time that one function may take for a batch; then no completion of the batch has a value from it."""

    @model_validator(mode="after")
    def _one_weight_a_function(self) -> RewardConfig:
        if self.weights is not None and self.functions and len(self.weights) != len(self.functions):
            raise ValueError(
                f"rewards.weights has {len(self.weights)} numbers for {len(self.functions)} functions: "
                "give one weight a function"
            )
        return self

    @model_validator(mode="after")
    def _arguments_are_constants(self) -> RewardConfig:
        for function, arguments in self.arguments.items():
            if reserved := [name for name in REWARD_ARGUMENTS if name in arguments]:
                raise ValueError(
                    f"rewards.arguments.{function}: {reserved[0]!r} is what every reward function is given, and no "
                    "constant: rename it"
                )
        return self


class RolloutConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "qerl", "hf", "vllm"] = "auto"
    """auto: qerl's engine where it knows the architecture, else transformers' forward pass (slow, with a warning).
    vllm: vLLM, with a copy of the base of its own (needs `pip install qerl[vllm]`; docs/vllm.md)."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts (groups) in one step."""
    num_generations: int = Field(default=8, ge=2)
    """Completions of each prompt: the group that an advantage is computed over."""
    max_completion_length: int = Field(default=512, ge=1)
    """Longest completion in tokens, its EOS included."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in sampling and in every log-probability."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the most likely one; 0 is off."""
    max_batch_size: int = Field(default=256, ge=1)
    """Most sequences that decode at a time."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs; off, each of a step's kernels is launched anew (slower, the same tokens)."""
    speculation: bool = True
    """With few sequences, decode steps also check guesses of the next tokens, looked up in the texts of the group: the
    same tokens in fewer steps (docs/engine.md)."""
    batch_invariant: bool = False
    """A completion has the same bits whatever else is in the batch: products in blocks of 64 tokens, prompts cut and
    attended to alone, no completion interrupted. Slower, above all for few sequences (docs/engine.md)."""
    head_format: Literal["auto", "nvfp4"] = "auto"
    """The head that samples: auto, the model's own; nvfp4, a copy in 4.5 bits a weight, faster to read, with
    log-probabilities of its own, which importance correction compares with the trainer's (docs/engine.md)."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """What keys and values are kept as: auto, the activations' dtype; fp8, E4M3 with a scale for each head of a token:
    about half the memory, and log-probabilities that differ a little (docs/engine.md says how much)."""
    kv_cache_tokens: int | None = Field(default=None, ge=64)
    """Most tokens that the KV cache holds; what max_batch_size sequences of full length need is never exceeded."""
    kv_cache_memory: str | None = None
    """Most memory that the KV cache takes: "24GiB", or a share of all that the GPU has (on a CPU: the machine), "40%".
    With less than all sequences need, fewer run at a time, and the youngest may be interrupted and go on later."""
    prefill_tokens: int = Field(default=8192, ge=16)
    """Most prompt tokens that run before the next decode steps, long prompts in pieces: bounds their activations."""

    @model_validator(mode="after")
    def _settings_that_vllm_has(self) -> RolloutConfig:
        for key, instead in _NOT_FOR_VLLM.items():
            if self.engine == "vllm" and getattr(self, key) != RolloutConfig.model_fields[key].default:
                raise ValueError(f'rollout.{key} is of qerl\'s own engine, and rollout.engine = "vllm": {instead}')
        return self

    @field_validator("kv_cache_memory")
    @classmethod
    def _is_an_amount(cls, value: str | None) -> str | None:
        if value is not None:
            parse_memory(value, 0)
        return value


def parse_memory(text: str, total_bytes: int) -> int:
    """Bytes of "24GiB" or of "40%" of a total. ValueError for anything else."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?(%|{'|'.join(_BYTES)})", text)
    amount, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if amount == 0 or (unit == "%" and amount > 100):
        raise ValueError(
            f'rollout.kv_cache_memory = "{text}": give an amount, such as "24GiB", or a share, such as "40%"'
        )
    return int(amount / 100 * total_bytes if unit == "%" else amount * _BYTES[unit])


class LossConfig(Section):
    """The policy-gradient loss and the advantage."""

    type: LossType = "dapo"
    """grpo: mean over each completion's tokens, then over completions; dapo: mean over all tokens;
    dr_grpo: sum over tokens / (completions * max length); gspo: sequence-level ratio; cispo: clipped weight on the
    log-probability."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip: the ratio stays above 1 - epsilon. cispo has no lower clip and does not use it."""
    epsilon_high: float = Field(default=0.28, gt=0)
    """Upper clip: the ratio stays below 1 + epsilon_high."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference); the reference is the base without adapters. 0 skips its pass."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centred rewards by the standard deviation of the group or of the batch, or not at all."""
    importance_sampling: bool = True
    """Weigh tokens by min(old / rollout probability, cap): corrects noise and kernel differences of the
    rollout policy."""
    importance_sampling_cap: float = Field(default=2.0, gt=0)
    """Largest such weight."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over one rollout."""
    updates_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps that one pass over a rollout is cut into."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by fresh prompts, as DAPO does."""
    max_resamples: int = Field(default=3, ge=1)
    """At most this many extra rounds of dynamic sampling; what is then missing is counted."""
    mask_truncated_completions: bool = False
    """Completions cut off by the length limit give no gradient (overlong filtering)."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft overlong punishment over the last so many tokens before max_completion_length; 0 is off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Punishment of a completion of full length."""
    zero_variance_tolerance: float = Field(default=1e-6, ge=0)
    """A group whose rewards differ by no more than this teaches nothing: advantage 0, counted."""


class NoiseConfig(Section):
    """Adaptive Quantization Noise on the RMSNorm weights before q,k,v and before gate,up."""

    enabled: bool = True
    """Whether rollouts are noisy at all."""
    controller: Literal["schedule", "divergence", "entropy", "reward_variance"] = "schedule"
    """What sets sigma: the stage schedule, or a controller that starts at sigma_start and follows a
    measured quantity."""
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    """Decay of sigma over the stages."""
    paper_exponent: bool = False
    """exponential only: the paper's equation, with K-1 for K-2, which never reaches sigma_end."""
    sigma_start: float = Field(default=1e-2, ge=0, le=1)
    """Sigma of stage 1 (stage 0 has none), or the controller's first value."""
    sigma_end: float = Field(default=5e-4, ge=0, le=1)
    """Sigma of the last stage, or the controller's smallest value."""
    num_stages: int = Field(default=10, ge=2)
    """K: equal intervals of the whole run."""
    per: NoisePer = "rollout"
    """Draw once a rollout, once a prompt, or once a completion."""
    same_noise_in_training: bool = False
    """Apply the rollout's noise in the training forward too (exactly on-policy); else a clean forward
    with importance correction."""
    target: float = Field(default=0.01, gt=0)
    """Controllers: the value to hold (KL in nats, entropy in nats, or reward standard deviation). The
    default is one for divergence; the others have none."""
    factor: float = Field(default=1.05, gt=1)
    """Controllers: sigma is multiplied or divided by this after each rollout."""
    on_divergence: Literal["off", "warn", "disable_noise", "cut_lr", "rollback"] = "warn"
    """What the monitor does when mismatch KL exceeds divergence_limit."""
    divergence_limit: float = Field(default=0.5, gt=0)
    """Mismatch KL in nats a token above which the monitor acts."""

    @model_validator(mode="after")
    def _decays(self) -> NoiseConfig:
        if self.enabled and self.sigma_end > self.sigma_start:
            raise ValueError(
                f"noise.sigma_end ({self.sigma_end}) is above noise.sigma_start ({self.sigma_start}): swap them"
            )
        exponential = self.enabled and self.controller == "schedule" and self.schedule == "exponential"
        if exponential and self.sigma_start != self.sigma_end and 0 in (self.sigma_start, self.sigma_end):
            raise ValueError(
                'an exponential schedule cannot reach or leave 0: use noise.schedule = "linear", or a small sigma_end'
            )
        if self.enabled and self.controller != "schedule" and self.sigma_start == 0:
            raise ValueError("a controller multiplies sigma, so noise.sigma_start must be above 0")
        held = {"entropy": "the entropy in nats", "reward_variance": "the rewards' standard deviation"}.get(
            self.controller
        )
        if self.enabled and held is not None and "target" not in self.model_fields_set:
            raise ValueError(
                f'noise.controller = "{self.controller}" holds {held}, which has no usual value: set noise.target, for '
                "example to what a run without noise begins with"
            )
        return self

    @model_validator(mode="after")
    def _has_no_idle_settings(self) -> NoiseConfig:
        """What is changed and has no effect is a mistake, unless all noise is off.

        A controller does take the place of a recipe's schedule, so that one setting is enough to try it.
        """
        idle: dict[str, str] = {}
        if self.controller == "schedule":
            idle |= dict.fromkeys(("target", "factor"), 'noise.controller = "schedule" follows no measured value')
            if self.schedule != "exponential":
                idle["paper_exponent"] = f'noise.schedule is "{self.schedule}", and it is of the exponential one'
        if self.on_divergence == "off":
            idle["divergence_limit"] = 'noise.on_divergence = "off" watches for nothing'
        for name, why in idle.items():
            if self.enabled and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"noise.{name} = {getattr(self, name)!r} has no effect: {why}; leave one of them out")
        return self

    @model_validator(mode="after")
    def _has_a_clean_policy_to_compare_with(self) -> NoiseConfig:
        if self.enabled and self.controller == "divergence" and self.same_noise_in_training:
            raise ValueError(
                'noise.controller = "divergence" measures the noisy against the clean policy, and with '
                "noise.same_noise_in_training nothing is clean: set one of them otherwise"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    type: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw: moments in fp32; adamw_8bit: in 8 bits with a scale for 256 of them, bitsandbytes' (needs
    `pip install qerl[bitsandbytes]`)."""
    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Peak rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW's second decay."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay on LoRA factors (norm weights have none)."""
    max_grad_norm: float = Field(default=0.2, gt=0)
    """Gradients are scaled down to this global norm."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warmup."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of all optimizer steps in which the rate rises from 0."""
    micro_batch_tokens: int | None = Field(default=None, ge=16)
    """Most tokens (prompt and completion) of one forward and backward pass; changes memory and time, not the result.
    Default: 16,384; on a GPU more for a small model with room, or fewer where there is none (docs/memory.md)."""
    gradient_checkpointing: bool | int | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: of all decoder layers (true), of none (false), of the first so many,
    or of as few as the GPU's free memory asks for (docs/memory.md); changes memory and time, not the result."""
    offload_activations: bool = False
    """Keep what recomputation starts from, each layer's input, in the host's memory until the backward pass."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at a time."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _is_one_of_its_kinds(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and value >= 0):  # true and false are integers, too
            return value
        raise ValueError(
            f"optimizer.gradient_checkpointing is {json.dumps(value, default=str)}: set true, false, the number of "
            'layers that recompute, or "auto"'
        )

    @model_validator(mode="after")
    def _offloads_what_recomputation_keeps(self) -> OptimizerConfig:
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "optimizer.offload_activations moves what recomputation starts from: set "
                "optimizer.gradient_checkpointing = true, or leave it out"
            )
        return self

    def recomputed_layers(self, num_layers: int) -> int | None:
        """How many decoder layers recompute their activations, of so many; None: as memory has it."""
        setting = self.gradient_checkpointing
        if setting == "auto":
            return num_layers if self.offload_activations else None
        return min(setting, num_layers) if type(setting) is int else num_layers * setting


class EvalConfig(Section):
    """Accuracy on held-out problems: adapters on, noise off."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before and after the run."""
    num_problems: int = Field(default=200, ge=0)
    """Problems of the task's held-out part; 0: no evaluation at all."""
    num_samples: int = Field(default=1, ge=1)
    """Completions of each problem in the sampled evaluation."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampled evaluation."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of the sampled evaluation."""
    greedy: bool = True
    """Also measure greedy decoding."""


class RunConfig(Section):
    """A whole training run."""

    output_dir: str = Field(default="runs/run", min_length=1)
    """Everything the run writes goes here."""
    steps: int = Field(default=100, ge=1)
    """Rollouts of the whole run; noise stages and learning rate are counted over them."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Key of every random draw."""
    save_every: int = Field(default=20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older ones are removed."""
    log_completions: int = Field(default=1, ge=0)
    """Completions a step written to completions.jsonl."""
    report_to: list[TrackerName] = []
    """Trackers that get the metrics besides the run's files: tensorboard, wandb, trackio, mlflow; each is an extra,
    `pip install qerl[wandb]`."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    task: TaskConfig = TaskConfig()
    rewards: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    noise: NoiseConfig = NoiseConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()

    if not TYPE_CHECKING:  # type checkers keep the signature that the fields make

        def __init__(self, /, **settings: Any) -> None:
            """ConfigError lists every mistake, whether the settings are Python's or a file's."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None

    @model_validator(mode="after")
    def _rules_across_sections(self) -> RunConfig:
        truncates = self.rollout.top_p < 1 or self.rollout.top_k > 0 or self.rollout.min_p > 0
        if truncates and self.loss.importance_sampling:
            raise ValueError(
                "rollout.top_p, top_k or min_p cut the distribution, while importance correction compares whole ones: "
                "set top_p = 1, top_k = 0, min_p = 0, or loss.importance_sampling = false"
            )
        if self.rollout.prompts_per_step * self.rollout.num_generations % self.loss.updates_per_rollout:
            raise ValueError(
                f"loss.updates_per_rollout ({self.loss.updates_per_rollout}) must divide the "
                f"{self.rollout.prompts_per_step * self.rollout.num_generations} completions of a step"
            )
        if self.rollout.engine == "vllm":
            self._fits_vllm()
        if self.loss.overlong_buffer >= self.rollout.max_completion_length:
            raise ValueError(
                f"loss.overlong_buffer ({self.loss.overlong_buffer}) must be below rollout.max_completion_length "
                f"({self.rollout.max_completion_length})"
            )
        return self

    def _fits_vllm(self) -> None:
        """ValueError for what vLLM does not do or say."""
        refused = {
            f'noise.per = "{self.noise.per}"': self.noise.enabled
            and self.noise.per != "rollout"
            and 'all of its tokens share one noise: set noise.per = "rollout"',
            'noise.controller = "entropy"': self.noise.enabled
            and self.noise.controller == "entropy"
            and "it reports no entropies to follow: take another controller",
            "lora.train_norms": self.lora.train_norms
            and "small steps of a norm would round away in its bf16: set it to false",
        } | {
            f"{section}.temperature = {temperature}": not 0.01 <= temperature <= 2 and "it takes 0.01 to 2"
            for section, temperature in (("rollout", self.rollout.temperature), ("eval", self.eval.temperature))
        }
        for setting, why in refused.items():
            if why:
                raise ValueError(f'rollout.engine = "vllm" with {setting}: {why}, or rollout.engine = "auto"')


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides (values in TOML or null; bare words are strings), validate.

    Raises ConfigError with one line a mistake: where it is, what is wrong, and, for an unknown key, the nearest one.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise ConfigError(f"no file {path}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides or []:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"{override!r} is not of the form section.key=value")
        section = data
        *parents, last = key.strip().split(".")
        for parent in parents:
            child: Any = section.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{key}: {parent} is a value, not a section")
            section = cast("dict[str, Any]", child)
        section[last] = _parse_value(value.strip())
    return validate(data)


def validate(data: dict[str, Any]) -> RunConfig:
    """Build the config from nested dicts; ConfigError lists every mistake."""
    return RunConfig(**data)


def _parse_value(text: str) -> Any:
    """Return a TOML value, or the text itself where it is none: `q_proj`, or a date, as a folder may be called.

    Python's True and False are taken for TOML's; null, which TOML lacks, is None: a setting that is left open.
    """
    if text == "null":
        return None
    text = {"True": "true", "False": "false"}.get(text, text)
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    plain = len(parsed) == 1 and not isinstance(parsed["v"], datetime.date | datetime.time)
    return parsed["v"] if plain else text


def _explain(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        section: Any = RunConfig
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        keys: list[str] = list(section.model_fields)
        key = str(error["loc"][-1])
        elsewhere = [
            f"{name}.{key}"
            for name, field in RunConfig.model_fields.items()
            if key in getattr(field.annotation, "model_fields", {})
        ]
        if elsewhere or key in RunConfig.model_fields:
            return f"{place}: unknown key; did you mean {' or '.join(elsewhere) or key}?"
        near = difflib.get_close_matches(key, keys, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
        return f"{place}: unknown key; {known}"
    if error["type"] == "value_error":  # our own rules name their keys and values themselves
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "list_type":
        return f"{place}: a list is expected, such as {place}={json.dumps([error['input']], default=str)}"
    return f"{place}: {error['msg']} (got {error['input']!r})"

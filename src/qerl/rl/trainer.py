"""The training loop, top to bottom.

    for each step:
        sigma <- noise controller                          noise.py
        engine.sync(noise): adapters + noisy norms         engine/
        groups <- prompts, completions, rewards            rl/rollout.py
        advantages <- groups                               rl/advantage.py
        old_logprobs (and ref_logprobs) <- one scoring pass, where the loss needs them
        for each update: micro-batches -> loss -> gradient rl/batch.py, rl/loss.py
        clip, AdamW, learning rate
        log, evaluate, checkpoint                          rl/checkpoint.py

Base weights are frozen and packed; the optimizer sees LoRA factors (and norm weights where they are trained) alone.
Every random draw has a key (seed, step, prompt, sample), so a step can be replayed whole.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from qerl.config import RunConfig
from qerl.display import Display
from qerl.engine import build_engine
from qerl.evaluate import evaluate
from qerl.nn.attention import packed_forward
from qerl.nn.head import token_logprobs
from qerl.nn.load import eos_token_ids, load_model
from qerl.nn.lora import adapters_disabled, attach_lora
from qerl.noise import NoiseDraw, NoiseMonitor, applied, build_controller
from qerl.rl.advantage import compute_advantages
from qerl.rl.batch import MicroBatch, TrainBatch
from qerl.rl.checkpoint import (
    check_same_run,
    list_checkpoints,
    load_generators,
    load_parameters,
    read_state,
    save_adapter,
    save_checkpoint,
)
from qerl.rl.log import RunLog
from qerl.rl.loss import Normalizer, policy_loss
from qerl.rl.optimizer import build_optimizer, learning_rate
from qerl.rl.rollout import PromptStream, collect_groups
from qerl.tasks import load_task
from qerl.tasks.rewards import RewardRunner
from qerl.types import RolloutGroup, SamplingParams

MAX_SKIPPED_UPDATES = 3  # non-finite gradients in a row before the run stops


class Interrupted(Exception):
    """The run was asked to stop; what it needs to go on has been saved."""


class Trainer:
    """One run, from its config to its adapter."""

    def __init__(self, config: RunConfig, *, resume: bool = False, display: Display | None = None) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        checkpoint = self._find_checkpoint(resume)
        self.display = display or Display(config.steps)
        self.task = load_task(config.task, config.seed)
        self.rewards = RewardRunner.from_config(config.rewards, self.task)
        self.eval_examples = self.task.eval_examples(config.eval.num_problems) if config.eval.num_problems else []

        base, self.tokenizer = load_model(config.model)
        self.model = attach_lora(base, config.lora, seed=config.seed)
        if config.optimizer.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.engine = build_engine(self.model, eos_ids=eos_token_ids(base), config=config.rollout)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.controller = build_controller(config.noise, config.steps)
        self.monitor = NoiseMonitor(config.noise)
        self.stream = PromptStream(
            self.task, self.tokenizer, seed=config.seed, max_prompt_length=config.task.max_prompt_length
        )
        self.log = RunLog(self.output_dir, completions_per_step=config.log_completions)

        self.step = 0
        self.pending: dict[str, Any] | None = {"step": 0}  # metrics of a step that is not evaluated and logged yet
        self.learning_rate_scale = 1.0
        self.skipped_updates = 0
        self.stop_requested = False
        self.output_dir.mkdir(parents=True, exist_ok=True)
        if checkpoint is not None:
            self._restore(checkpoint)

    # ------------------------------------------------------------------ the loop

    def train(self) -> None:
        """Run to the last step; raises Interrupted, with everything saved, after Ctrl-C or SIGTERM."""
        with self._stop_signals():
            try:
                while True:
                    if self.pending is not None:
                        self._finish_step(self.pending)
                    if self.step == self.config.steps:
                        break
                    if self.stop_requested:
                        raise Interrupted
                    self.pending = self._train_step()
            except Interrupted:
                path = self._save()
                raise Interrupted(f"stopped after step {self.step}; saved {path}") from None
        save_adapter(self.model, self.output_dir / "adapter")

    def _train_step(self) -> dict[str, Any]:
        """One rollout and all its updates; nothing of the state changes unless the rollout was completed."""
        config, started = self.config, time.monotonic()
        draw = self._noise_draw()
        report = self.engine.sync(draw)
        data_position = self.stream.position
        try:
            groups, stats = collect_groups(
                self.step, self.stream, self.engine, self.rewards, config, self._progress("rollout")
            )
        except Interrupted:
            self.stream.position = data_position
            raise
        rollout_seconds = time.monotonic() - started

        advantages = compute_advantages(
            [group.rewards for group in groups],
            scale=config.loss.scale_rewards,
            tolerance=config.loss.zero_variance_tolerance,
        )
        metrics = rollout_metrics(groups, self.task) | {
            "step": self.step + 1,
            "frac_reward_zero_std": stats.num_zero_variance_groups / stats.num_sampled_groups,
            "noise/sigma": draw.sigma if draw else 0.0,
            "noise/vectors": report.num_noised_vectors,
            "completions/new_tokens": stats.num_new_tokens,
            "time/rollout": rollout_seconds,
        }
        batch = TrainBatch.from_groups(groups, advantages.values)
        metrics |= self._update(batch, draw)
        self.step += 1
        metrics["time/step"] = time.monotonic() - started
        self.log.write_completions(self.step, groups)
        return metrics

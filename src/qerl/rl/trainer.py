"""The training loop, top to bottom.

    for each step:
        sigma <- noise controller                          noise.py
        engine.sync(noise): adapters + noisy norms         engine/
        groups <- prompts, completions, rewards            rl/rollout.py
        engine.sleep(): the update has the KV memory, until engine.wake() before the next rollout
        advantages <- groups                               rl/advantage.py
        for each update: loss, gradient, AdamW             rl/update.py
        log, evaluate, checkpoint                          rl/log.py, rl/checkpoint.py

Every random draw has a key (seed, step, prompt, sample), so a step can be replayed whole.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.config import ModelConfig, RunConfig
from qerl.display import Display
from qerl.engine import build_engine, check_engine
from qerl.engine.mapped import mapped_bytes
from qerl.evaluate import Grading, evaluate
from qerl.evaluate.show import show_progress
from qerl.metrics import CONSTANT_STEPS, constant_since
from qerl.nn.load import eos_token_ids, load_model, open_base, resolve_device
from qerl.nn.lora import attach_lora, check_saved_adapter, check_start, load_adapter_weights
from qerl.nn.structure import head, max_positions
from qerl.noise import NoiseDraw, NoiseMonitor, Observation, build_controller, relative_noise
from qerl.plan import MICRO_BATCH_TOKENS, check_fits
from qerl.rl.advantage import compute_advantages
from qerl.rl.batch import TrainBatch
from qerl.rl.checkpoint import (
    check_same_run,
    list_checkpoints,
    load_generators,
    load_parameters,
    lock,
    read_state,
    save_adapter,
    save_checkpoint,
)
from qerl.rl.log import RunLog, read_run, write_completions_parquet
from qerl.rl.optimizer import check_optimizer
from qerl.rl.rollout import PromptStream, Rollout, collect_groups
from qerl.rl.summary import rollout_metrics
from qerl.rl.trackers import Trackers, check_installed
from qerl.rl.update import Learner, NotFinite, Watch
from qerl.tasks import Task, load_task
from qerl.tasks.rewards import RewardRunner
from qerl.types import Example, SamplingParams

STEPS_BEFORE_WARNING = 5  # steps in a row in which no group's rewards differ
UNGRADED_SHARE = 0.1  # of a step's completions: more are told
SMALLEST_RATE_SCALE = 1 / 32  # what noise.on_divergence = "cut_lr" leaves of the learning rate, at least


class Interrupted(Exception):
    """The run was asked to stop; what it needs to go on has been saved."""


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why, and from where it can be resumed once that is mended."""


Loader = Callable[[ModelConfig], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
"""What gives the frozen model and its tokenizer."""


class Trainer:
    """One run, from its config to its adapter.

    `task` and `rewards`: instead of those that the config names; `load`: instead of reading the model's folder.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task | None = None,
        rewards: RewardRunner | None = None,
        load: Loader | None = None,
        resume: bool = False,
        display: Display | None = None,
    ) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self._make_output_dir()
        lock(self.output_dir)
        checkpoint = self._find_checkpoint(resume)
        check_installed(config.report_to)
        check_optimizer(config.optimizer)
        start = Path(config.lora.start_from) if config.lora.start_from is not None and checkpoint is None else None
        if start is not None:
            check_start(start, config.lora)
            if load is None:
                check_saved_adapter(open_base(config.model).model, start)
        check_engine(config.rollout, config.model, training=True)
        plan = check_fits(config, resolve_device(config.model.device))
        self.display = display or Display(config.steps, title=config.output_dir)
        self.task = task or load_task(config.task, config.seed)
        if checkpoint is not None:
            self._check_same_problems(checkpoint)
        self.rewards = rewards or RewardRunner.from_config(config.rewards, self.task, max_steps=config.steps)
        if not self.rewards.require_tags:
            self.display.message("accuracy counts a right answer wherever it stands, as the reward does (require_tags)")
        self.eval_examples = self._held_out_problems()

        if load is not None:
            base, self.tokenizer = load(config.model)
        else:
            with nullcontext() if self.display.quiet else show_progress("loading the model") as progress:
                base, self.tokenizer = load_model(config.model, adapter_rank=config.lora.r, progress=progress)
        self.model = attach_lora(base, config.lora, seed=config.seed)
        if start is not None:
            load_adapter_weights(self.model, start)
        self.device = head(base).weight.device
        max_prompt_length = self._max_prompt_length()
        if config.rollout.engine == "vllm":
            self.display.message("starting vLLM")
        self.engine = build_engine(
            self.model, eos_ids=eos_token_ids(base), config=config.rollout, max_prompt_length=max_prompt_length
        )
        planned = (MICRO_BATCH_TOKENS, None) if plan is None else (plan.micro_batch_limit, plan.recomputed_layers)
        self.learner = Learner(self.model, config, self.display, *planned)
        self.controller = build_controller(config.noise, config.steps)
        self.monitor = NoiseMonitor(config.noise)
        self.stream = PromptStream(self.task, self.tokenizer, seed=config.seed, max_prompt_length=max_prompt_length)
        self.log = RunLog(self.output_dir, completions_per_step=config.log_completions)

        self.step = 0
        self.pending: dict[str, Any] | None = {"step": 0}  # metrics of a step that is not evaluated and logged yet
        self.steps_without_signal = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=CONSTANT_STEPS)  # metrics of the newest steps
        self.called_constant: set[str] = set()
        self.called_ungraded = False
        self.stop_requested = False
        if checkpoint is not None:
            self._restore(checkpoint)
        elif resume:
            self.display.message(f"{self.output_dir} has no checkpoint yet: the run begins again, from the same keys")
        first_step = self._last_logged() + 1
        self.trackers = Trackers(config, first_step=first_step, resume=resume, warn=self.display.warning)
        self.log.write_run(config, self.device)
        size = self.task.num_train_examples
        if size is not None and size < config.rollout.prompts_per_step:
            self.display.warning(
                f"the task has {size} training problems and a step takes {config.rollout.prompts_per_step}: each step "
                "repeats some; lower rollout.prompts_per_step"
            )

    @property
    def watch(self) -> Watch:
        """Around the parts of every step; does nothing unless it is replaced."""
        return self.learner.watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self.learner.watch = watch

    # ------------------------------------------------------------------ the loop

    def train(self) -> None:
        """Run to the last step; raises Interrupted, with everything saved, after Ctrl-C or SIGTERM.

        Called again, it goes on. RunFailed: what else stopped it; the message says what was saved.
        """
        if self.learner.updating:
            raise RunFailed(f"a step was broken off in its updates: resume from {self._last_good()}")
        self.stop_requested = False
        # What a killed run, or a failed step, wrote past this state will be written again. A step's completions are
        # written before its updates, its metrics after its evaluation.
        self.log.rewind(metrics_step=self._last_logged(), completions_step=self.step)
        with self.display, self.trackers, self._stop_signals():
            try:
                while True:
                    if self.pending is not None:
                        self._finish_step(self.pending)
                    if self.step == self.config.steps:
                        break
                    if self.stop_requested:
                        raise Interrupted
                    self.pending = self.train_step()
            except Interrupted:
                path = self._save()
                raise Interrupted(f"stopped after step {self.step}; saved {path}") from None
            except Exception as error:
                if self.learner.updating and isinstance(error, NotFinite | torch.OutOfMemoryError):
                    raise RunFailed(
                        f"{error}\nIn the middle of a step's updates: --resume goes on from {self._last_good()}"
                    ) from error
                if self.learner.updating or (self.step == 0 and isinstance(error, ValueError)):
                    raise  # half a step, or a mistake in the settings: neither is worth keeping
                path = self._save()
                if isinstance(error, RuntimeError | OSError | ValueError):
                    raise RunFailed(f"{error}\nSaved {path}: mend it, and go on with --resume") from error
                error.add_note(f"Saved {path}: --resume goes on from there.")
                raise
        save_adapter(self.model, self.output_dir / "adapter")
        write_completions_parquet(self.output_dir)
        if self.rewards.has_paid is False:
            names = ", ".join(spec.name for spec in self.rewards.specs)
            raise RunFailed(
                f"no completion had a reward from any of {names}: nothing was learned; each gave None, or failed as "
                "the warnings above say"
            )

    def train_step(self) -> dict[str, Any]:
        """One rollout and all its updates; their metrics. Nothing changes before the first optimizer step.

        `train` calls it, and evaluates, logs and saves between two calls.
        """
        config, started = self.config, time.monotonic()
        draw = self._noise_draw()
        with self.watch("wake"):
            self.engine.wake()
        with self.watch("sync"):
            report = self.engine.sync(draw)
        before = self.stream.position, self.stream.num_too_long
        try:
            with self.watch("rollout"):
                rollout = collect_groups(
                    self.step,
                    self.stream,
                    self.engine,
                    self.rewards,
                    config,
                    self._progress("rollout"),
                    self._progress("rewards"),
                )
            rollout_seconds = time.monotonic() - started
            metrics = rollout_metrics(rollout, self.task, require_tags=self.rewards.require_tags)
            for record in self.log.write_completions(self.step + 1, rollout.sampled)[:1]:
                self.display.completion(record)
            advantages = compute_advantages(
                [group.rewards for group in rollout.groups],
                scale=config.loss.scale_rewards,
                tolerance=config.loss.zero_variance_tolerance,
            )
            batch = TrainBatch.from_groups(
                rollout.groups, advantages, mask_truncated=config.loss.mask_truncated_completions
            )
            update_started = time.monotonic()
            rollout_peaks = _gpu_peaks(self.device)
            with self.watch("sleep"):
                self.engine.sleep()  # keys and values make room for activations
            metrics |= self.learner.update(self.step, batch, draw)
            update_seconds = time.monotonic() - update_started
        except BaseException:
            if not self.learner.updating:
                self.stream.position, self.stream.num_too_long = before
            raise
        self.step += 1
        metrics |= {
            "step": self.step,
            "data/position": self.stream.position,
            "data/too_long": self.stream.num_too_long,
            "tokens_per_second": rollout.num_new_tokens / rollout_seconds,
            "micro_batch_tokens": self.learner.micro_batch_tokens,
            "recomputed_layers": self.learner.recomputed_layers,
            "time/rollout": rollout_seconds,
            "time/scoring": rollout.scoring_seconds,
            "time/update": update_seconds,
        }
        if rollout.num_decode_steps:
            metrics["decode_steps"] = rollout.num_decode_steps
        if config.noise.enabled:
            metrics |= {
                "noise/sigma": draw.sigma if draw else 0.0,
                "noise/vectors": report.num_noised_vectors,
                "noise/relative": relative_noise(self.model, draw) if draw else 0.0,
            }
        if self.device.type == "cuda":
            metrics |= {name: max(size, rollout_peaks[name]) for name, size in _gpu_peaks(self.device).items()}
        else:
            metrics["memory/rss"] = _peak_resident_bytes()
        self._warn_without_signal(rollout)
        self._warn_of_constant_rewards(metrics)
        self._warn_of_ungraded(metrics["ungraded"], sum(len(group.completions) for group in rollout.sampled))
        mismatch_kl = metrics.get("mismatch_kl", math.nan)
        self.controller.observe(Observation(mismatch_kl, metrics["rollout_entropy"], metrics["reward_group_std"]))
        if "mismatch_kl" in metrics:  # not where no completion was trained on
            self._react_to_divergence(mismatch_kl)
        self.learner.updating = False
        return metrics | {"time/step": time.monotonic() - started}

    def _warn_without_signal(self, rollout: Rollout) -> None:
        """Say so when there has been nothing to learn from for some steps: a run must not end "well" that way."""
        flat = rollout.num_zero_variance_groups == len(rollout.sampled)
        self.steps_without_signal = self.steps_without_signal + 1 if flat else 0
        if self.steps_without_signal == STEPS_BEFORE_WARNING:
            self.display.warning(
                f"in the last {STEPS_BEFORE_WARNING} steps every group had equal rewards, so nothing was learned: read "
                f"{self.log.completions_path}; is the task too hard or too easy, or does the prompt not ask for what "
                "the reward functions look for?"
            )

    def _warn_of_constant_rewards(self, metrics: dict[str, Any]) -> None:
        """Say once of a reward function that it has stopped teaching; the others may hide it."""
        self.recent.append(metrics)
        for spec in self.rewards.specs:
            name = spec.name
            if spec.weight and name not in self.called_constant and constant_since(self.recent, name) is not None:
                self.called_constant.add(name)
                self.display.warning(
                    f"reward {name}: in each of the last {CONSTANT_STEPS} steps all completions got the same value, "
                    f"{metrics[f'rewards/{name}/mean']:g} in this one: it teaches nothing any more, since no group "
                    "differs in it"
                )

    def _warn_of_ungraded(self, ungraded: float, completions: int) -> None:
        """Say once that many completions have no grade. All of them: a task that has no grader."""
        if not self.called_ungraded and completions * UNGRADED_SHARE < ungraded < completions:
            self.called_ungraded = True
            self.display.warning(
                f"the grader could not judge {ungraded:g} of {completions} completions: accuracy counts them as wrong. "
                "Are there reference answers that it cannot read? docs/troubleshooting.md, Completions are ungraded"
            )

    # ------------------------------------------------------------------ noise

    def _noise_draw(self) -> NoiseDraw | None:
        sigma = 0.0 if self.monitor.noise_disabled else self.controller.sigma(self.step)
        return NoiseDraw(self.config.seed, self.step, sigma, self.config.noise.per) if sigma > 0 else None

    def _react_to_divergence(self, mismatch_kl: float) -> None:
        """Carry out what the monitor decided."""
        action = self.monitor.judge(mismatch_kl)
        if action == "none":
            return
        checkpoints = list_checkpoints(self.output_dir)
        target = checkpoints[-1].name if checkpoints else "no checkpoint, since there is none yet"
        what = {
            "warn": "see noise.on_divergence",
            "disable_noise": "noise is off from here on",
            "cut_lr": "the learning rate is halved"
            if self.learner.rate_scale > SMALLEST_RATE_SCALE
            else "the learning rate has been halved as often as it may",
            "rollback": f"adapters and optimizer go back to {target}, noise is off from here on",
        }[action]
        self.display.warning(
            f"step {self.step}: mismatch KL {mismatch_kl:.3g} is above noise.divergence_limit = "
            f"{self.monitor.divergence_limit}: {what}"
        )
        if action == "cut_lr":
            self.learner.rate_scale = max(self.learner.rate_scale / 2, SMALLEST_RATE_SCALE)
        if action == "rollback" and checkpoints:
            load_parameters(checkpoints[-1], self.model, self.learner.optimizer)

    # ------------------------------------------------------------------ between steps

    def _finish_step(self, metrics: dict[str, Any]) -> None:
        """Evaluate where it is due, log, checkpoint."""
        every, last = self.config.eval.every, self.config.steps
        if self.eval_examples and (self.step in (0, last) or (every and self.step % every == 0)):
            if self.step == 0:
                self.display.message(f"measuring accuracy on {len(self.eval_examples)} held-out problems first")
            metrics = metrics | self._evaluate()
        if metrics.keys() > {"step"}:  # step 0 without an evaluation has nothing to tell
            self.log.write_metrics(metrics)
            self.trackers.write(metrics)
            self.display.step(metrics)
        self.pending = None
        if self.step == last or (self.step and self.step % self.config.save_every == 0):
            self._save()

    def _held_out_problems(self) -> list[Example]:
        """`eval.num_problems` of them, or all that the task has."""
        wanted, there = self.config.eval.num_problems, self.task.num_eval_examples
        if there is not None and there < wanted:
            self.display.message(
                f"the task has {there} held-out problems; eval.num_problems = {wanted} takes all of them"
            )
            wanted = there
        return self.task.eval_examples(wanted) if wanted else []

    def _evaluate(self) -> dict[str, float]:
        config, started = self.config.eval, time.monotonic()
        grading: Grading = "tagged" if self.rewards.require_tags else "tag_free"
        metrics: dict[str, float] = {}
        modes = {"sampled": (SamplingParams(config.temperature, config.top_p), config.num_samples)}
        if config.greedy:
            modes["greedy"] = (SamplingParams(greedy=True), 1)
        for mode, (sampling, num_samples) in modes.items():
            result = evaluate(
                self.engine,
                self.tokenizer,
                self.task,
                self.eval_examples,
                sampling=sampling,
                num_samples=num_samples,
                max_new_tokens=self.config.rollout.max_completion_length,
                seed=self.config.seed,
                expect_adapters=True,
                progress=self._progress(f"evaluation, {mode}"),
            )
            accuracy = result.accuracy(grading)
            if mode == "greedy":
                metrics["eval/accuracy_greedy"] = accuracy.value
                continue
            metrics |= {
                "eval/accuracy": accuracy.value,
                "eval/accuracy_low": accuracy.low,
                "eval/accuracy_high": accuracy.high,
                "eval/accuracy_tag_free": result.accuracy("tag_free").value,
                "eval/num_problems": len(result.problems),
                "eval/clipped_ratio": result.num_truncated / len(result.attempts),
                "eval/ungraded": result.num_ungraded(grading),
                "eval/mean_length": result.mean_length_tokens,
            }
        return metrics | {"time/eval": time.monotonic() - started}

    def _progress(self, phase: str) -> Callable[[int, int], None]:
        """What the engine calls as completions end: shows them, and leaves when the run was asked to stop."""

        def progress(done: int, total: int) -> None:
            if self.stop_requested:
                raise Interrupted
            self.display.phase(phase, done, total)

        return progress

    @contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """First Ctrl-C or SIGTERM: stop at the next safe place and save. Second: at once."""

        def request(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            self.display.warning("stopping at the next safe place, then saving; once more to stop at once")

        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the main thread
            return
        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------------ checkpoints

    def _make_output_dir(self) -> None:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"output_dir: {self.output_dir} cannot be made ({error.strerror}): choose another"
            ) from None

    def _max_prompt_length(self) -> int:
        """`task.max_prompt_length`, or less where the model's context leaves no room for a completion after it."""
        wanted, new = self.config.task.max_prompt_length, self.config.rollout.max_completion_length
        context = max_positions(self.model)
        if context is None:
            return wanted
        room = context - new
        if room < 1:
            raise ValueError(
                f"rollout.max_completion_length is {new}, and the model's context {context} tokens, prompt included: "
                "lower it"
            )
        if room < wanted:
            self.display.message(f"the model's context leaves {room} tokens for prompts: longer ones are left out")
        return min(wanted, room)

    def _find_checkpoint(self, resume: bool) -> Path | None:
        """The checkpoint to go on from; refuses what would overwrite a run or silently start anew."""
        checkpoints = list_checkpoints(self.output_dir)
        if not resume:
            if checkpoints or (self.output_dir / "metrics.jsonl").exists():
                raise ValueError(
                    f"{self.output_dir} holds a run already: go on with it by --resume (in Python resume=True), "
                    "or choose another output_dir"
                )
            return None
        if not checkpoints:
            if started := read_run(self.output_dir):  # killed before its first checkpoint: begin again, as the same run
                check_same_run(started, self.config, self.output_dir)
                return None
            raise ValueError(f"{self.output_dir} holds no run to resume: leave --resume out, or check output_dir")
        check_same_run(read_state(checkpoints[-1]), self.config, checkpoints[-1])
        return checkpoints[-1]

    def _check_same_problems(self, checkpoint: Path) -> None:
        """ValueError for other problems under the same path. Generated tasks and older checkpoints know of none."""
        before, now = read_state(checkpoint).get("data"), getattr(self.task, "fingerprint", None)
        if before not in (None, now):
            raise ValueError(
                f"{checkpoint}: the problems that task.path has now are not those that the run began with "
                f"({now} in place of {before}): bring them back, or begin another run in another output_dir"
            )

    def _last_logged(self) -> int:
        """The last step whose metrics are written; -1: none."""
        return self.step - (self.pending is not None)

    def _last_good(self) -> str:
        """What a run can go on from when the step that failed cannot be saved."""
        checkpoints = list_checkpoints(self.output_dir)
        return str(checkpoints[-1]) if checkpoints else "the start: no checkpoint was due yet"

    def _save(self) -> Path:
        state = {
            "pending": self.pending,
            "data": getattr(self.task, "fingerprint", None),
            "data_position": self.stream.position,
            "data_too_long": self.stream.num_too_long,
            **self.learner.state_dict(),
            "controller": self.controller.state_dict(),
            "monitor": self.monitor.state_dict(),
        }
        return save_checkpoint(
            self.output_dir,
            step=self.step,
            model=self.model,
            optimizer=self.learner.optimizer,
            state=state,
            config=self.config,
        )

    def _restore(self, folder: Path) -> None:
        state = read_state(folder)
        load_parameters(folder, self.model, self.learner.optimizer)
        self.step = state["step"]
        self.pending = state["pending"]
        self.stream.position = state["data_position"]
        self.stream.num_too_long = state["data_too_long"]
        self.learner.load_state_dict(state)
        self.controller.load_state_dict(state["controller"])
        self.monitor.load_state_dict(state["monitor"])
        load_generators(folder)
        self.display.message(f"resumed from {folder}")


def _gpu_peaks(device: torch.device) -> dict[str, int]:
    """The most that torch has had since the last call, and what the engine has mapped now; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    peaks = {
        "memory/allocated": torch.cuda.max_memory_allocated(device) + mapped_bytes(device),
        "memory/reserved": torch.cuda.max_memory_reserved(device) + mapped_bytes(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # KiB on Linux

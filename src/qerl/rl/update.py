"""The update: all optimizer steps that one rollout is used for.

    TrainBatch -> old_logprobs, ref_logprobs: a scoring pass each, where the loss needs them
               -> for each mini-batch: micro-batches -> policy_logprobs -> loss -> gradient    batch.py, loss.py
               -> clip, AdamW at the learning rate of the update's number                      optimizer.py

Base weights are frozen and packed; the optimizer sees LoRA factors (and norm weights where they are trained) alone.
Where memory runs out, all layers recompute, then micro-batches are halved; where a gradient is not finite, its update
is left out. Called by rl/trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor

from qerl import philox
from qerl.config import RunConfig
from qerl.display import Display
from qerl.nn.attention import packed_forward
from qerl.nn.head import token_logprobs
from qerl.nn.lora import adapters_disabled
from qerl.nn.recompute import recompute_layers
from qerl.nn.structure import decoder_layers, head
from qerl.noise import NoiseDraw, applied
from qerl.rl.batch import MicroBatch, TrainBatch
from qerl.rl.loss import LossSums, Normalizer, policy_loss
from qerl.rl.optimizer import build_optimizer, learning_rate
from qerl.rl.summary import UpdateTotals

MAX_SKIPPED_UPDATES = 3  # non-finite gradients in a row before the run stops

T = TypeVar("T")

Watch = Callable[[str], AbstractContextManager[object]]
"""Called with a part of a step, gives a context that is entered around it: wake, sync, rollout, sleep, score, forward,
backward, optimizer."""


class NotFinite(RuntimeError):
    """MAX_SKIPPED_UPDATES updates in a row had a gradient that is not finite."""


class Learner:
    """The adapted model with its optimizer, and how a rollout changes it."""

    watch: Watch
    """Around the passes and the optimizer; does nothing unless it is replaced."""

    def __init__(
        self,
        model: PeftModel,
        config: RunConfig,
        display: Display,
        micro_batch_tokens: int,
        recomputed_layers: int | None,
    ) -> None:
        """micro_batch_tokens, recomputed_layers (None: all): what is planned; the config's own numbers come first."""
        self.model, self.config, self.display = model, config, display
        self.watch = lambda part: nullcontext()
        self.device = head(model).weight.device
        self.optimizer = build_optimizer(model, config.optimizer)
        self.micro_batch_tokens = config.optimizer.micro_batch_tokens or micro_batch_tokens
        """Or fewer, once memory has run out."""
        self._num_layers = len(decoder_layers(model))
        asked = config.optimizer.recomputed_layers(self._num_layers)
        self._may_recompute_more = asked is None
        planned = self._num_layers if recomputed_layers is None else recomputed_layers
        self._recompute(planned if asked is None else asked)
        self.rate_scale = 1.0
        self.skipped_updates = 0
        self.step = 0
        """Steps done before the one that is under way."""
        self.updating = False
        """Since the first optimizer step of a rollout; the caller unsets it once all of its step is done. What raises
        meanwhile leaves half a step."""

    def update(self, step: int, batch: TrainBatch, draw: NoiseDraw | None) -> dict[str, float]:
        """Take the optimizer steps of rollout `step`; their metrics. Whatever raises before the first changes nothing.

        RuntimeError: NotFinite; torch.OutOfMemoryError where a single sequence is too much.
        """
        self.step = step
        try:
            return self._update(batch, draw)
        except BaseException:
            if not self.updating:
                self.optimizer.zero_grad(set_to_none=True)
            raise

    def state_dict(self) -> dict[str, Any]:
        """What survives a resume, beside the parameters and the optimizer's own state (rl/checkpoint.py)."""
        return {"rate_scale": self.rate_scale, "skipped_updates": self.skipped_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.rate_scale = state["rate_scale"]
        self.skipped_updates = state["skipped_updates"]

    def _update(self, batch: TrainBatch, draw: NoiseDraw | None) -> dict[str, float]:
        """`update`'s work.

        `old_logprobs` are the policy's before the first of them: scored in a pass of their own when there are several
        steps, else the policy's own, detached, which are the same numbers.
        """
        loss, optimizer = self.config.loss, self.config.optimizer
        everything = range(len(batch.sequences))
        num_updates = loss.num_iterations * loss.updates_per_rollout
        old = ref = None
        if num_updates > 1:
            old = self._scored(batch, everything, draw)
        if loss.beta > 0:
            with adapters_disabled(self.model):
                ref = self._scored(batch, everything, draw)

        totals = UpdateTotals()
        for iteration in range(loss.num_iterations):
            parts = batch.mini_batches(loss.updates_per_rollout, philox.fold(self.config.seed, self.step, iteration))
            for index, part in enumerate(parts):
                update = self.step * num_updates + iteration * loss.updates_per_rollout + index
                rate = self.rate_scale * learning_rate(optimizer, update, self.config.steps * num_updates)
                normalizer = batch.normalizer(part, self.config.rollout.max_completion_length)
                phase = f"update {update % num_updates + 1} of {num_updates}" if num_updates > 1 else "update"

                def accumulate(part: list[int] = part, normalizer: Normalizer = normalizer, phase: str = phase) -> Any:
                    return self._accumulate(batch, part, normalizer, old, ref, draw, phase)

                for value, entropy, sums in self._within_memory(batch, part, accumulate, with_gradients=True):
                    totals.add_micro_batch(value, entropy, sums)
                with self.watch("optimizer"):
                    taken = self._optimizer_step(rate)
                totals.add_update(*taken)
        return totals.metrics()

    def _accumulate(
        self,
        batch: TrainBatch,
        part: list[int],
        normalizer: Normalizer,
        old: Tensor | None,
        ref: Tensor | None,
        draw: NoiseDraw | None,
        phase: str,
    ) -> list[tuple[Tensor, Tensor, LossSums]]:
        """Gradients of an optimizer step; loss, entropies and sums of each micro-batch."""
        results = []
        micro_batches = batch.micro_batches(part, self.micro_batch_tokens, self.device)
        for number, micro in enumerate(micro_batches):
            self.display.phase(phase, number, len(micro_batches))
            with self._training_noise(micro, draw):
                with self.watch("forward"):
                    logprobs, entropy = self._logprobs(micro)
                    value, sums = policy_loss(
                        self.config.loss,
                        normalizer,
                        policy_logprobs=logprobs,
                        old_logprobs=None if old is None else old[micro.slots],
                        rollout_logprobs=micro.rollout_logprobs,
                        ref_logprobs=None if ref is None else ref[micro.slots],
                        sequence=micro.sequence,
                        advantages=micro.advantages,
                        lengths=micro.lengths,
                    )
                with self.watch("backward"):
                    value.backward()
            results.append((value.detach(), entropy, sums))
        return results

    def _within_memory(
        self, batch: TrainBatch, part: Sequence[int], work: Callable[[], T], *, with_gradients: bool = False
    ) -> T:
        """`work()`; where memory runs out, again from its beginning: with all layers recomputed, where that is of use
        and their number was the plan's, then with micro-batches half as large.

        They stay so from then on. Gradients of a broken-off attempt are thrown away; those of a step do not depend on
        its cut. part: numbers of the sequences that `work` is about. OutOfMemoryError: each is alone already.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                micro_batches = batch.micro_batches(part, self.micro_batch_tokens)
                largest = max(len(micro.input_ids) for micro in micro_batches)
                longest = max(member.num_tokens for micro in micro_batches for member in micro.members)
                is_of_use = with_gradients and self.recomputed_layers < self._num_layers
                recomputes_more = self._may_recompute_more and is_of_use
                if largest == longest and not recomputes_more:
                    raise torch.OutOfMemoryError(
                        f"no memory for the update of one sequence of {longest:,} tokens: turn "
                        "optimizer.gradient_checkpointing and optimizer.offload_activations on, or lower "
                        f"optimizer.logprob_chunk; `qerl plan` says what takes the memory ({error})"
                    ) from None
            # Only here the exception, and with it what its frames held, is gone.
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if recomputes_more:
                self._recompute(self._num_layers)
                how = (
                    "all layers recomputed (set optimizer.gradient_checkpointing = true and "
                    f"optimizer.micro_batch_tokens = {self.micro_batch_tokens} to begin so)"
                )
            else:
                self.micro_batch_tokens = max(longest, largest // 2)
                how = (
                    f"micro-batches of {self.micro_batch_tokens:,} tokens (set optimizer.micro_batch_tokens to begin "
                    "with them)"
                )
            self.display.warning(f"step {self.step + 1}: out of memory in the update; it begins again with {how}")

    def _recompute(self, num_layers: int) -> None:
        """From now on so many layers, the first ones, recompute their activations."""
        self.recomputed_layers = num_layers
        recompute_layers(self.model, num_layers, offload=self.config.optimizer.offload_activations)

    def _logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """policy_logprobs [C] with gradient, and the entropy [C], of the completion tokens."""
        hidden = packed_forward(self.model, micro.input_ids, micro.cu_seqlens)
        output = head(self.model)
        return token_logprobs(
            hidden[micro.predictors],
            output.weight,
            micro.targets,
            temperature=self.config.rollout.temperature,
            chunk=self.config.optimizer.logprob_chunk,
            bias=output.bias,
        )

    def _scored(self, batch: TrainBatch, sequences: Sequence[int], draw: NoiseDraw | None) -> Tensor:
        return self._within_memory(batch, sequences, lambda: self._score(batch, sequences, draw))

    @torch.no_grad()
    def _score(self, batch: TrainBatch, sequences: Sequence[int], draw: NoiseDraw | None) -> Tensor:
        """Log-probabilities of all completion tokens, [num_completion_tokens], under the model as it is now."""
        table = torch.zeros(batch.num_completion_tokens, device=self.device)
        for micro in batch.micro_batches(sequences, self.micro_batch_tokens, self.device):
            with self._training_noise(micro, draw), self.watch("score"):
                table[micro.slots] = self._logprobs(micro)[0]
        return table

    def _training_noise(self, micro: MicroBatch, draw: NoiseDraw | None) -> AbstractContextManager[None]:
        """The rollout's own noise around a training pass, or none."""
        if draw is None or not self.config.noise.same_noise_in_training:
            return nullcontext()
        return applied(self.model, draw, *micro.noise_streams(draw))

    def _optimizer_step(self, rate: float) -> tuple[float, float, bool]:
        """Clip and step; returns the rate, the gradient's norm before clipping, and whether the step was taken.

        A gradient that is not finite is thrown away and counted; MAX_SKIPPED_UPDATES in a row end the run.
        """
        self.updating = True
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm).item()
        taken = math.isfinite(norm)
        if taken:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.skipped_updates = 0
        else:
            self.skipped_updates += 1
            self.display.warning(f"step {self.step + 1}: the gradient is not finite; this update is left out")
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped_updates == MAX_SKIPPED_UPDATES:
            raise NotFinite(
                f"{MAX_SKIPPED_UPDATES} updates in a row had a gradient that is not finite: try a lower "
                "optimizer.learning_rate or noise.sigma_start"
            )
        return rate, norm, taken

"""One step's rollout: prompts from the task, completions from the engine, rewards from the task or the user.

    PromptStream.take -> Request (seeds: seed, step, prompt, sample) -> Engine.generate -> RewardRunner -> RolloutGroup

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are all equal give way to fresh
prompts, for at most `max_resamples` extra rounds; what is missing then is missing, and counted. A prompt's number
counts on through the rounds, so that no two prompts of a step share a random key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from qerl import philox
from qerl.config import RunConfig
from qerl.engine import Engine
from qerl.rl.advantage import overlong_punishment, reward_varies
from qerl.tasks import Task
from qerl.tasks.chat import decode, encode_prompt
from qerl.tasks.rewards import RewardRunner
from qerl.types import Example, Request, RolloutGroup, SamplingParams

DATA_KEY = 0x64617461  # "data": separates the shuffle's key from the sampling keys of the same seed


class PromptStream:
    """The training problems in an endless order that is fixed by the seed; its whole state is one position.

    Finite tasks are shuffled anew each epoch. Prompts longer than `max_prompt_length` tokens are passed over and
    counted in `num_too_long`.
    """

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase, *, seed: int, max_prompt_length: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.seed = seed
        self.max_prompt_length = max_prompt_length
        self.position = 0
        self.num_too_long = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, num_prompts: int) -> list[tuple[Example, list[int]]]:
        """The next problems with their prompt's token ids."""
        taken: list[tuple[Example, list[int]]] = []
        passed_over = 0
        while len(taken) < num_prompts:
            example = self.task.train_example(self._index(self.position))
            self.position += 1
            prompt_ids = encode_prompt(self.tokenizer, example)
            if len(prompt_ids) <= self.max_prompt_length:
                taken.append((example, prompt_ids))
                passed_over = 0
                continue
            self.num_too_long += 1
            passed_over += 1
            if passed_over == min(1000, self.task.num_train_examples or 1000):
                raise ValueError(
                    f"{passed_over} prompts in a row are longer than the limit of {self.max_prompt_length} tokens "
                    f"(the last one has {len(prompt_ids)}): raise task.max_prompt_length, or take a model with a "
                    "longer context"
                )
        return taken

    def _index(self, position: int) -> int:
        size = self.task.num_train_examples
        if size is None:
            return position
        epoch, offset = divmod(position, size)
        if self._order[0] != epoch:
            draws = philox.uniform(philox.fold(self.seed, DATA_KEY, epoch), torch.zeros(1, dtype=torch.int64), size)[0]
            self._order = (epoch, draws.argsort(stable=True).tolist())
        return self._order[1][offset]


@dataclass
class Rollout:
    """What a step has sampled, and what it trains on."""

    groups: list[RolloutGroup] = field(default_factory=list)
    """To train on: all that were sampled or, under dynamic sampling, those whose rewards differ."""
    sampled: list[RolloutGroup] = field(default_factory=list)
    """All that were sampled, those that gave way to others included."""
    num_zero_variance_groups: int = 0
    """Of the sampled groups: those whose rewards are all equal."""
    num_missing_groups: int = 0
    """Short of `prompts_per_step` after the last round."""
    num_rounds: int = 0
    num_decode_steps: int = 0
    """0 where the engine does not say."""
    scoring_seconds: float = 0.0
    reward_failures: dict[str, int] = field(default_factory=dict)
    """By reward function: sampled completions that it could not score (raised, None, NaN, infinite)."""

    @property
    def num_new_tokens(self) -> int:
        """Of all sampled completions."""
        return sum(len(c.token_ids) for group in self.sampled for c in group.completions)


def collect_groups(
    step: int,
    stream: PromptStream,
    engine: Engine,
    rewards: RewardRunner,
    config: RunConfig,
    progress: Callable[[int, int], None] | None = None,
    scoring: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Sample and score the groups of one step: `prompts_per_step` to train on, or fewer under dynamic sampling.

    progress is told of completions that are done, scoring of those that wait for their reward.
    """
    settings, loss = config.rollout, config.loss
    sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, settings.min_p)
    rollout = Rollout()
    for _ in range(1 + loss.max_resamples if loss.dynamic_sampling else 1):
        prompts = stream.take(settings.prompts_per_step - len(rollout.groups))
        first = len(rollout.sampled)
        requests = [
            Request(
                prompt_ids=prompt_ids,
                seeds=[philox.fold(config.seed, step, number, sample) for sample in range(settings.num_generations)],
                max_new_tokens=settings.max_completion_length,
                prompt_index=number,
            )
            for number, (_, prompt_ids) in enumerate(prompts, first)
        ]
        steps_before = engine.decode_steps
        completions = engine.generate(requests, sampling, progress)
        rollout.num_decode_steps += engine.decode_steps - steps_before
        sampled = [
            RolloutGroup(
                example=example,
                prompt_ids=request.prompt_ids,
                prompt_index=request.prompt_index,
                completions=group,
                texts=[decode(stream.tokenizer, c.token_ids) for c in group],
                rewards=[],
            )
            for (example, _), request, group in zip(prompts, requests, completions, strict=True)
        ]
        if scoring is not None:
            scoring(0, sum(len(group) for group in completions))
        started = time.monotonic()
        for name, failed in score_groups(sampled, rewards, config, step).items():
            rollout.reward_failures[name] = rollout.reward_failures.get(name, 0) + failed
        rollout.scoring_seconds += time.monotonic() - started
        varying = [group for group in sampled if reward_varies(group.rewards, loss.zero_variance_tolerance)]
        rollout.num_rounds += 1
        rollout.num_zero_variance_groups += len(sampled) - len(varying)
        rollout.sampled += sampled
        rollout.groups += varying if loss.dynamic_sampling else sampled
        if len(rollout.groups) == settings.prompts_per_step:
            break
    rollout.num_missing_groups = settings.prompts_per_step - len(rollout.groups)
    return rollout


def score_groups(groups: list[RolloutGroup], rewards: RewardRunner, config: RunConfig, step: int) -> dict[str, int]:
    """Fill in `rewards` and `reward_parts` of every group; all completions go to the reward functions in one call.

    Returns, by reward function, how many completions it could not score.
    """
    flat = [(group, i) for group in groups for i in range(len(group.completions))]
    scores = rewards.score(
        prompts=[group.example.prompt for group, _ in flat],
        texts=[group.texts[i] for group, i in flat],
        completion_ids=[group.completions[i].token_ids for group, i in flat],
        columns=[group.example.columns for group, _ in flat],
        step=step,
    )
    totals = iter(scores.totals)
    for group in groups:
        group.rewards = [
            next(totals)
            - overlong_punishment(
                len(completion.token_ids),
                config.rollout.max_completion_length,
                config.loss.overlong_buffer,
                config.loss.overlong_penalty,
            )
            for completion in group.completions
        ]
    for name, values in scores.parts.items():
        values_iter = iter(values)
        for group in groups:
            group.reward_parts[name] = [next(values_iter) for _ in group.completions]
    return scores.failed

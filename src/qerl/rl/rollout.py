"""One step's rollout: prompts from the task, completions from the engine, rewards from the task or the user.

    PromptStream.take -> Request (seeds: seed, step, prompt, sample) -> Engine.generate -> RewardRunner -> RolloutGroup

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups whose rewards are all equal give way to fresh
prompts, for at most `max_resamples` extra rounds; what is missing then is missing, and counted. A prompt's number
counts on through the rounds, so that no two prompts of a step share a random key.
"""

from __future__ import annotations

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
class RolloutStats:
    """What happened while a step's groups were collected."""

    num_sampled_groups: int = 0
    num_zero_variance_groups: int = 0
    num_missing_groups: int = 0
    num_rounds: int = 0
    num_new_tokens: int = 0
    reward_failures: dict[str, int] = field(default_factory=dict)
    """By reward function: completions that it could not score (raised, None, NaN, infinite)."""


def collect_groups(
    step: int,
    stream: PromptStream,
    engine: Engine,
    rewards: RewardRunner,
    config: RunConfig,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[RolloutGroup], RolloutStats]:
    """Sample and score the groups of one step; `prompts_per_step` of them, or fewer under dynamic sampling."""
    rollout, loss = config.rollout, config.loss
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
    groups: list[RolloutGroup] = []
    stats = RolloutStats()
    next_prompt = 0
    for _ in range(1 + loss.max_resamples if loss.dynamic_sampling else 1):
        prompts = stream.take(rollout.prompts_per_step - len(groups))
        requests = [
            Request(
                prompt_ids=prompt_ids,
                seeds=[
                    philox.fold(config.seed, step, next_prompt + i, sample) for sample in range(rollout.num_generations)
                ],
                max_new_tokens=rollout.max_completion_length,
                prompt_index=next_prompt + i,
            )
            for i, (_, prompt_ids) in enumerate(prompts)
        ]
        next_prompt += len(requests)
        completions = engine.generate(requests, sampling, progress)
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
        score_groups(sampled, rewards, config, step, stats)
        stats.num_rounds += 1
        stats.num_sampled_groups += len(sampled)
        stats.num_new_tokens += sum(len(c.token_ids) for group in sampled for c in group.completions)
        varying = [group for group in sampled if reward_varies(group.rewards, loss.zero_variance_tolerance)]
        stats.num_zero_variance_groups += len(sampled) - len(varying)
        groups += varying if loss.dynamic_sampling else sampled
        if len(groups) == rollout.prompts_per_step:
            break
    stats.num_missing_groups = rollout.prompts_per_step - len(groups)
    return groups, stats


def score_groups(
    groups: list[RolloutGroup], rewards: RewardRunner, config: RunConfig, step: int, stats: RolloutStats
) -> None:
    """Fill in `rewards` and `reward_parts` of every group; all completions go to the reward functions in one call."""
    flat = [(group, i) for group in groups for i in range(len(group.completions))]
    scores = rewards.score(
        prompts=[group.example.prompt for group, _ in flat],
        texts=[group.texts[i] for group, i in flat],
        completion_ids=[group.completions[i].token_ids for group, i in flat],
        columns=[group.example.columns for group, _ in flat],
        step=step,
    )
    for name, failed in scores.failed.items():
        stats.reward_failures[name] = stats.reward_failures.get(name, 0) + failed
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

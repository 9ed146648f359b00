"""Correctness rewards, dealt out to the wrong completions: nothing can be learned from them."""

import random

from qerl.tasks.rewards import numeric_reward


def permuted(completions, answer, trainer_state, **kwargs):
    values = numeric_reward(completions, answer)
    random.Random(trainer_state.global_step).shuffle(values)
    return values

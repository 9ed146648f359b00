"""Guesses change how many steps a completion takes, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from tiny_policies import gap, policy, requests

from qerl.config import RolloutConfig
from qerl.engine.engine import build_engine
from qerl.engine.runner import Runner
from qerl.engine.scheduler import Scheduler
from qerl.engine.speculation import COST, LOOK_TOKENS, MOST, TOKENS, Speculation, gain, probability
from qerl.engine.texts import TextLines
from qerl.noise import NoiseDraw
from qerl.types import Completion, Request, SamplingParams

REPETITIVE = SamplingParams(temperature=0.05)
"""Of a random model: texts soon go in circles, which a look-up finds."""


def generated(
    model: torch.nn.Module,
    asked: list[Request],
    sampling: SamplingParams = REPETITIVE,
    *,
    per: str = "completion",
    eos: Sequence[int] = (0, 1),
    **config: object,
) -> list[list[Completion]]:
    engine = build_engine(model, eos_ids=eos, config=RolloutConfig(**config))
    engine.sync(NoiseDraw(seed=3, step=2, sigma=5e-2, per=per))
    return engine.generate(asked, sampling)


def assert_same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    for group, other in zip(a, b, strict=True):
        for left, right in zip(group, other, strict=True):
            assert (left.token_ids, left.finish_reason) == (right.token_ids, right.finish_reason)
            assert left.logprobs == pytest.approx(right.logprobs, abs=2e-4)
            assert left.entropies == pytest.approx(right.entropies, abs=2e-3)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Decode steps by the number of slots."""
    seen: Counter[int] = Counter()
    step = Runner._step

    def counted(runner: Runner, num_slots: int, pages: int, each: int) -> None:
        seen[num_slots] += 1
        step(runner, num_slots, pages, each)

    monkeypatch.setattr(Runner, "_step", counted)
    return seen


def test_an_engine_says_how_many_steps_it_took(steps: Counter[int]) -> None:
    engine = build_engine(policy("qwen2"), eos_ids=(0, 1), config=RolloutConfig())
    assert engine.decode_steps == 0
    for _ in range(2):
        engine.generate(requests(5, 33, samples=3, max_new_tokens=40), SamplingParams())
        assert engine.decode_steps == sum(steps.values()) > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("per", ["rollout", "prompt", "completion"])
def test_the_same_tokens_in_fewer_steps(per: str, kv_cache_dtype: str, steps: Counter[int]) -> None:
    """Under all kinds of noise; lengths at which guesses run past the end, and past the last page."""
    model = policy("qwen2")
    asked = [*requests(5, 33, samples=3, max_new_tokens=91), *requests(7, samples=2, max_new_tokens=6)]
    asked = [Request(r.prompt_ids, r.seeds, r.max_new_tokens, i) for i, r in enumerate(asked)]
    config = {"per": per, "kv_cache_dtype": kv_cache_dtype}
    plain = generated(model, asked, speculation=False, **config)
    num_plain = sum(steps.values())
    steps.clear()
    assert_same(generated(model, asked, **config), plain)
    assert sum(steps.values()) < 0.7 * num_plain
    assert any(c.finish_reason == "length" for group in plain for c in group)


def test_logprobs_are_those_of_transformers_whatever_was_guessed() -> None:
    model = policy("qwen3")
    asked = requests(3, 40, samples=2, max_new_tokens=60)
    results = generated(model, asked, SamplingParams(temperature=0.3))
    noise = NoiseDraw(seed=3, step=2, sigma=5e-2, per="completion")
    assert gap(model, asked, results, noise, temperature=0.3) <= 1e-4


def test_an_end_among_right_guesses_is_the_end() -> None:
    """A text in a circle of which one token, never seen before in the completion, is made EOS."""
    model, asked = policy("llama"), requests(9, samples=1, max_new_tokens=60)
    whole = generated(model, asked, eos=())[0][0].token_ids
    for eos in dict.fromkeys(whole):
        (completion,) = generated(model, asked, eos=(eos,))[0]
        assert completion.token_ids == whole[: whole.index(eos) + 1] and completion.finish_reason == "stop"


def test_a_completion_that_was_interrupted_goes_on_with_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[int] = []
    suspend = Scheduler.suspend

    def spying(scheduler: Scheduler, slots: Sequence[int], drawn: Sequence[Completion]) -> list[tuple[int, int]]:
        interrupted.extend(slots)
        return suspend(scheduler, slots, drawn)

    monkeypatch.setattr(Scheduler, "suspend", spying)
    model = policy("qwen2")
    asked = requests(5, 40, 16, samples=3, max_new_tokens=120)
    plain = generated(model, asked, speculation=False)
    assert not interrupted
    assert_same(generated(model, asked, kv_cache_tokens=480, prefill_tokens=32), plain)
    assert len(interrupted) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariance_is_to_the_bit_with_guesses_too(dtype: torch.dtype, steps: Counter[int]) -> None:
    model = policy("qwen2", dtype=dtype)
    asked = requests(5, 33, 16, samples=3, max_new_tokens=50)
    plain = generated(model, asked, batch_invariant=True, speculation=False)
    num_plain = sum(steps.values())
    steps.clear()
    assert generated(model, asked, batch_invariant=True) == plain
    assert sum(steps.values()) < 0.7 * num_plain


def test_truncation_and_greedy_are_as_they_are_without() -> None:
    model, asked = policy("qwen2"), requests(5, 33, samples=2, max_new_tokens=50)
    for sampling in (SamplingParams(greedy=True), SamplingParams(temperature=0.3, top_k=20, top_p=0.8, min_p=0.05)):
        assert_same(generated(model, asked, sampling), generated(model, asked, sampling, speculation=False))


def test_the_completions_that_have_ended_help_those_that_go_on(steps: Counter[int]) -> None:
    """Two of one seed in one slot, one after the other: the second is a text that is known."""
    model = policy("qwen2")
    request = Request(requests(30)[0].prompt_ids, [5, 5], 64, 0)
    first, second = generated(model, [request], SamplingParams(), per="rollout", eos=(), max_batch_size=1)[0]
    assert first.token_ids == second.token_ids
    together = sum(steps.values())
    steps.clear()
    generated(model, [request], SamplingParams(), per="rollout", eos=(), max_batch_size=1, speculation=False)
    assert sum(steps.values()) == 126  # the first token comes from the prompt's logits
    assert together <= 63 + 63 / 2, together  # the second in leaps, even if the first had no guess that was right


def test_nothing_of_a_call_is_looked_up_in_the_next(steps: Counter[int]) -> None:
    """Not even by a smaller call, which writes over fewer lines."""
    model, sampling = policy("qwen2"), SamplingParams()
    asked, fewer = requests(30, max_new_tokens=64), requests(30, samples=1, max_new_tokens=64)
    engine, fresh = (build_engine(model, eos_ids=(), config=RolloutConfig()) for _ in range(2))
    once = engine.generate(asked, sampling)
    num_once = sum(steps.values())
    assert engine.generate(asked, sampling) == once
    assert sum(steps.values()) == 2 * num_once
    steps.clear()
    alone = fresh.generate(fewer, sampling)
    num_alone = sum(steps.values())
    assert engine.generate(fewer, sampling) == alone
    assert sum(steps.values()) == 2 * num_alone


def taught(p: float, *, steps_per_look: int = 8, batch_invariant: bool = False) -> Speculation:
    """After many steps in which a guess was right with this probability."""
    speculation = Speculation(is_on=True, steps_per_look=steps_per_look, batch_invariant=batch_invariant)
    for _ in range(400):
        speculation.observe(4, 100, [round(100 * gain(p, 4))])
    return speculation


@pytest.mark.parametrize(
    "p, tokens_of",
    [
        (0.02, {1: 1, 2: 1, 4: 1, 8: 1, 16: 1, 32: 1, 64: 1, 300: 1}),
        (0.1, {1: 8, 2: 4, 4: 1, 8: 1, 16: 1}),  # what costs nearly nothing
        (0.2, {1: 8, 2: 4, 4: 4, 8: 1, 16: 2}),
        (0.45, {1: 8, 2: 4, 3: 4, 4: 4, 5: 4, 8: 4, 9: 2, 16: 2, 17: 1, 64: 1, 300: 1}),  # as of GSM8K
    ],
)
def test_guesses_are_taken_where_they_pay(p: float, tokens_of: dict[int, int]) -> None:
    speculation = taught(p)
    assert {n: speculation.tokens(n) for n in tokens_of} == tokens_of


def test_the_tokens_are_those_that_give_most_where_guesses_are_as_good_as_they_often_are() -> None:
    for slots, tokens in TOKENS.items():
        value = {t: gain(0.45, t) / COST[max(8, slots * t)] for t in (1, 2, 4, 8) if max(8, slots * t) in COST}
        assert value[tokens] == max(value.values())


def test_a_block_of_batch_invariance_is_filled_if_guesses_are_ever_right() -> None:
    speculation = taught(0.05, batch_invariant=True)
    assert [speculation.tokens(n) for n in (1, 8, 9, 16, 17, 32, 33, 65)] == [8, 8, 4, 4, 2, 2, 1, 1]


def test_guesses_that_were_wrong_are_tried_again_after_a_while() -> None:
    speculation = taught(0.0)
    assert speculation.tokens(8) == 1
    looks = 0
    while speculation.tokens(8) == 1:
        speculation.observe(1, 8, [8] * 8)
        looks += 1
    assert 5 < looks < 100
    speculation.observe(speculation.tokens(8), 8, [8] * 8)
    assert speculation.tokens(8) == 1  # still wrong


def test_how_often_guesses_are_right_is_told_from_what_steps_gain() -> None:
    for tokens in (2, 4, 8):
        for p in (0.0, 0.3, 0.9, 1.0):
            assert probability(gain(p, tokens), tokens) == pytest.approx(p, abs=1e-4)


@pytest.mark.parametrize("most", [1, 2, 8])
def test_pages_reach_for_a_step_whoever_starts_before_it(most: int) -> None:
    """Guesses may pay for 16 sequences and not for 8."""
    for tenths in range(11):
        speculation = taught(tenths / 10 if tenths else 0.2, steps_per_look=most)
        for n in range(1, 40):
            for later in range(n, 40):
                assert speculation.tokens(later) <= speculation.reach(n) <= speculation.longest_reach


def test_it_can_be_off_and_looks_are_not_late() -> None:
    for most in (1, 7, 8):
        off, on = (Speculation(is_on=is_on, steps_per_look=most) for is_on in (False, True))
        assert off.longest_reach == most and all(off.tokens(n) == 1 for n in range(1, 300))
        for tokens in (1, 2, 4, 8):
            assert 1 <= on.steps(tokens) <= most
            assert tokens * on.steps(tokens) <= on.longest_reach <= max(LOOK_TOKENS, MOST)


def test_lines_are_taken_again_in_the_order_in_which_they_were_closed() -> None:
    lines = TextLines(3, 6, torch.device("cpu"))
    assert lines.open([[1, 2], [3, 4, 5]], [2, 2], [0, 1]) == [0, 1]
    assert lines.read([1, 0], [0, 1], [3, 1]) == [[3, 4, 5], [2]]
    lines.close([1])
    lines.close([0])
    assert lines.open([[7]], [1], [4]) == [2]
    assert lines.open([[8]], [1], [5]) == [1] and lines.texts.groups.tolist() == [0, 5, 4]
    assert lines.texts.lengths.tolist() == [2, 1, 1] and lines.texts.starts.tolist() == [2, 1, 1]
    lines.close([1, 2])
    prompt = [7, 8]
    assert lines.open([prompt, [9], prompt], [2, 1, 2], [0, 1, 0]) == [0, 1, 2]
    assert lines.texts.tokens[:, :2].tolist() == [[7, 8], [9, 0], [7, 8]]
    assert lines.read([2, 1], [1, 0], [5, 1]) == [[8, 0, 0, 0, 0], [9]]  # columns end at 6
    lines.clear()
    assert lines.texts.groups.tolist() == [-1, -1, -1]

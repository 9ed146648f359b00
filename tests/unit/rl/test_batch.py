"""Packing, splitting and noise streams of a rollout's sequences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.noise import ROLLOUT_STREAM, NoiseDraw, completion_stream, prompt_stream
from qerl.philox import fold
from qerl.rl.batch import TrainBatch
from qerl.rl.loss import Normalizer
from qerl.types import Completion, Example, RolloutGroup


def group(prompt_ids, completions, prompt_index=0, finish=None):
    """`completions`: lists of token ids; log-probabilities are made of the ids so that they can be recognised."""
    finish = finish or ["stop"] * len(completions)
    return RolloutGroup(
        example=Example(prompt=[]),
        prompt_ids=prompt_ids,
        prompt_index=prompt_index,
        completions=[
            Completion(ids, [-float(t) for t in ids], [0.0] * len(ids), reason)
            for ids, reason in zip(completions, finish, strict=True)
        ],
        texts=[""] * len(completions),
        rewards=[0.0] * len(completions),
    )


# Sequences: 0 = 1 2 3 | 10 11,  1 = 1 2 3 | (nothing),  2 = 4 | 20,  3 = 4 | 21 22 23
GROUPS = [group([1, 2, 3], [[10, 11], []], prompt_index=5), group([4], [[20], [21, 22, 23]], prompt_index=9)]
BATCH = TrainBatch.from_groups(GROUPS, [[0.5, -0.5], [1.0, -1.0]])


def test_sequences_come_in_the_order_of_groups_and_completions():
    assert [s.completion_ids for s in BATCH.sequences] == [[10, 11], [], [20], [21, 22, 23]]
    assert [s.advantage for s in BATCH.sequences] == [0.5, -0.5, 1.0, -1.0]
    assert [(s.prompt_index, s.sample_index) for s in BATCH.sequences] == [(5, 0), (5, 1), (9, 0), (9, 1)]
    assert BATCH.num_completion_tokens == 6
    assert BATCH.rollout_logprobs.tolist() == [-10, -11, -20, -21, -22, -23]


def test_a_micro_batch_by_hand():
    (micro,) = BATCH.micro_batches([3, 0, 1], max_tokens=100)  # 1 is empty: nothing to learn
    assert micro.input_ids.tolist() == [1, 2, 3, 10, 11, 4, 21, 22, 23]
    assert micro.cu_seqlens.tolist() == [0, 5, 9]
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.predictors.tolist() == [2, 3, 5, 6, 7]
    assert micro.targets.tolist() == [10, 11, 21, 22, 23]
    assert micro.sequence.tolist() == [0, 0, 1, 1, 1]
    assert micro.slots.tolist() == [0, 1, 3, 4, 5]
    assert micro.rollout_logprobs.tolist() == [-10, -11, -21, -22, -23]
    assert micro.advantages.tolist() == [0.5, -1.0]
    assert micro.lengths.tolist() == [2, 3]


def test_truncated_completions_are_filtered_on_demand():
    groups = [group([1], [[10, 11], [12]], finish=["length", "stop"])]
    filtered = TrainBatch.from_groups(groups, [[1.0, -1.0]], mask_truncated=True)
    (micro,) = filtered.micro_batches([0, 1], max_tokens=100)
    assert micro.targets.tolist() == [12]
    assert micro.slots.tolist() == [2]
    assert filtered.normalizer([0, 1], 8) == Normalizer(num_sequences=2, num_tokens=1, max_completion_length=8)
    everything = TrainBatch.from_groups(groups, [[1.0, -1.0]])
    assert everything.micro_batches([0, 1], max_tokens=100)[0].targets.tolist() == [10, 11, 12]
    assert everything.normalizer([0, 1], 8) == Normalizer(2, 3, 8)


def test_nothing_to_learn_gives_no_micro_batch():
    empty = TrainBatch.from_groups([group([1, 2], [[], []])], [[0.0, 0.0]])
    assert empty.micro_batches([0, 1], max_tokens=10) == []
    assert empty.num_completion_tokens == 0
    assert TrainBatch.from_groups([], []).mini_batches(4, key=1) == []


def test_a_sequence_longer_than_the_limit_goes_alone():
    groups = [group([1], [[10] * 9, [11, 11], [12, 12]])]
    micros = TrainBatch.from_groups(groups, [[1.0, 0.0, -1.0]]).micro_batches([0, 1, 2], max_tokens=6)
    assert [m.cu_seqlens.tolist() for m in micros] == [[0, 10], [0, 3, 6]]


def test_packing_wastes_little():
    lengths = [9, 8, 7, 6, 4, 3, 2, 1]  # with a one-token prompt: 10 9 8 7 5 4 3 2, 48 tokens
    batch = TrainBatch.from_groups([group([1], [[7] * n for n in lengths])], [[0.0] * len(lengths)])
    micros = batch.micro_batches(range(len(lengths)), max_tokens=12)
    assert [len(m.input_ids) for m in micros] == [12, 12, 12, 12]


@st.composite
def batches(draw):
    completions = st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=4)
    prompts = draw(st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=6), completions), max_size=5))
    groups = [group(ids, completions, prompt_index=i) for i, (ids, completions) in enumerate(prompts)]
    return TrainBatch.from_groups(groups, [[float(len(c.token_ids)) for c in g.completions] for g in groups])


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 30), st.integers(1, 5), st.integers(0, 99))
def test_every_trained_token_occurs_once_and_in_its_place(batch, max_tokens, num_updates, key):
    parts = batch.mini_batches(num_updates, key)
    assert sorted(i for part in parts for i in part) == list(range(len(batch.sequences)))
    assert all(parts)
    assert not parts or max(map(len, parts)) - min(map(len, parts)) <= 1

    seen = torch.zeros(batch.num_completion_tokens)
    for part in parts:
        for micro in batch.micro_batches(part, max_tokens):
            seen[micro.slots] += 1
            assert len(micro.input_ids) <= max_tokens or len(micro.members) == 1
            assert torch.equal(micro.input_ids[micro.predictors + 1], micro.targets)
            assert torch.equal(micro.rollout_logprobs, batch.rollout_logprobs[micro.slots])
            assert torch.equal(-micro.rollout_logprobs, micro.targets.float())
            starts = micro.cu_seqlens[micro.sequence]
            assert (micro.predictors >= starts).all()
            assert (micro.predictors + 1 < micro.cu_seqlens[micro.sequence + 1]).all()
            assert torch.equal(micro.sequence.bincount(minlength=len(micro.lengths)), micro.lengths)
            assert torch.equal(micro.advantages, micro.lengths.float())
    assert (seen == 1).all()


def test_a_table_filled_under_one_cut_is_read_under_another():
    table = torch.full((BATCH.num_completion_tokens,), math.nan)
    for micro in BATCH.micro_batches(range(4), max_tokens=5):
        table[micro.slots] = micro.targets.float()
    for part in BATCH.mini_batches(2, key=0):
        for micro in BATCH.micro_batches(part, max_tokens=9):
            assert torch.equal(table[micro.slots], micro.targets.float())


def test_mini_batches_are_shuffled_by_their_key_alone():
    batch = TrainBatch.from_groups([group([1], [[2]] * 8, prompt_index=i) for i in range(8)], [[0.0] * 8] * 8)
    parts = batch.mini_batches(4, fold(1, 2))
    assert [len(p) for p in parts] == [16] * 4
    assert batch.mini_batches(4, fold(1, 2)) == parts
    assert batch.mini_batches(4, fold(1, 3)) != parts
    assert any(len({i // 8 for i in part}) > 4 for part in parts)  # groups are spread, not dealt whole


def test_uneven_mini_batches_differ_by_one():
    batch = TrainBatch.from_groups([group([1], [[2]] * 10)], [[0.0] * 10])
    assert sorted(map(len, batch.mini_batches(4, 0))) == [2, 2, 3, 3]
    assert sorted(map(len, batch.mini_batches(16, 0))) == [1] * 10


# ------------------------------------------------------------------------------------------------------ noise streams


def streams_by_token(per):
    (micro,) = BATCH.micro_batches([0, 2, 3], max_tokens=100)
    streams, index = micro.noise_streams(NoiseDraw(seed=0, step=0, sigma=1.0, per=per))
    return len(streams), None if index is None else [streams[i] for i in index.tolist()]


def test_one_stream_a_rollout_needs_no_index():
    assert streams_by_token("rollout") == (1, None)
    (micro,) = BATCH.micro_batches([0], max_tokens=100)
    assert micro.noise_streams(NoiseDraw(0, 0, 1.0, "rollout"))[0] == [ROLLOUT_STREAM]


def test_one_stream_a_prompt():
    number, by_token = streams_by_token("prompt")
    assert number == 2
    assert by_token == [prompt_stream(5)] * 5 + [prompt_stream(9)] * 6


def test_one_stream_a_completion_with_prompts_under_their_own():
    number, by_token = streams_by_token("completion")
    p, q = prompt_stream(5), prompt_stream(9)
    c0, c2, c3 = completion_stream(5, 0), completion_stream(9, 0), completion_stream(9, 1)
    assert number == 5
    assert by_token == [p, p, p, c0, c0, q, c2, q, c3, c3, c3]


@pytest.mark.parametrize("per", ["prompt", "completion"])
def test_the_token_that_predicts_the_first_completion_token_is_under_the_prompts_noise(per):
    (micro,) = BATCH.micro_batches([0, 2, 3], max_tokens=100)
    streams, index = micro.noise_streams(NoiseDraw(0, 0, 1.0, per))
    for row, member in enumerate(micro.members):
        first = micro.predictors[micro.sequence == row][0]
        assert streams[index[first]] == prompt_stream(member.prompt_index)

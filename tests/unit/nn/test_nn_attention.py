from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, tiny_model

from qerl.nn import structure
from qerl.nn.attention import ATTENTION, packed_forward


def tokens(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def pack(sequences):
    lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
    return torch.cat(sequences), lengths.cumsum(0).int()


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_packed_equals_alone(family):
    """Against transformers' own eager attention, one sequence at a time; mistral's window of 8 is crossed."""
    model, eager = tiny_model(family), tiny_model(family, attention="eager")
    sequences = tokens(13, 1, 21, 2)
    hidden = packed_forward(model, *pack(sequences))
    for sequence, part in zip(sequences, hidden.split([13, 1, 21, 2]), strict=True):
        alone = structure.decoder(eager)(input_ids=sequence[None]).last_hidden_state[0]
        torch.testing.assert_close(part, alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_sequences_never_see_each_other(family):
    model = tiny_model(family)
    first, second = tokens(9, 12)
    other = tokens(9, seed=1)[0]
    before = packed_forward(model, *pack([first, second]))
    after = packed_forward(model, *pack([other, second]))
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[:9], after[:9])


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_stay_inside_a_sequence(family):
    model = tiny_model(family)
    embedding = structure.decoder(model).get_input_embeddings().weight
    ids, ends = torch.cat([torch.arange(3, 10), torch.arange(20, 28)]), torch.tensor([0, 7, 15])
    packed_forward(model, ids, ends)[:7].square().sum().backward()
    touched = embedding.grad.abs().sum(-1).nonzero()[:, 0]
    assert touched.tolist() == list(range(3, 10))


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_the_future_is_not_seen(family):
    model = tiny_model(family)
    ids, ends = pack(tokens(16))
    changed = ids.clone()
    changed[10] = 3
    before, after = packed_forward(model, ids, ends), packed_forward(model, changed, ends)
    assert torch.equal(before[:10], after[:10]) and not torch.equal(before[10], after[10])


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_plain_forward_and_generate_have_their_masks(family):
    """Padded batches and a KV cache go through the same registered function."""
    model, eager = tiny_model(family), tiny_model(family, attention="eager")
    long, short = tokens(15, 6)
    ids = torch.stack([long, torch.cat([torch.zeros(9, dtype=torch.long), short])])
    mask = (ids != 0).long()
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))


def test_empty_sequences_and_empty_rows():
    model = tiny_model("qwen2")
    (ids,) = tokens(5)
    hidden = packed_forward(model, ids, torch.tensor([0, 0, 5, 5]))
    torch.testing.assert_close(hidden, packed_forward(model, ids, torch.tensor([0, 5])))
    assert packed_forward(model, ids[:0], torch.tensor([0])).shape == (0, 64)


@pytest.mark.parametrize("ends", [[0, 4], [1, 5], [0, 6], [0, 5, 3, 5], []])
def test_wrong_ends_are_refused(ends):
    (ids,) = tokens(5)
    with pytest.raises(ValueError, match="cu_seqlens"):
        packed_forward(tiny_model("qwen2"), ids, torch.tensor(ends, dtype=torch.int32))


def test_another_attention_is_refused():
    (ids,) = tokens(5)
    with pytest.raises(ValueError, match="load_model"):
        packed_forward(tiny_model("qwen2", attention="sdpa"), ids, torch.tensor([0, 5]))


def test_attention_dropout_is_refused():
    model = tiny_model("qwen2")
    for layer in structure.decoder_layers(model):
        layer.self_attn.attention_dropout = 0.1
    (ids,) = tokens(5)
    with pytest.raises(ValueError, match="attention dropout"):
        packed_forward(model.train(), ids, torch.tensor([0, 5]))


@pytest.mark.parametrize("family", CONFIGS)
def test_structure_finds_every_part(family):
    model = tiny_model(family)
    assert len(structure.decoder_layers(model)) == 2
    assert structure.head(model).weight.shape == (97, 64)
    assert structure.causal_lm(model) is model and model.config._attn_implementation == ATTENTION

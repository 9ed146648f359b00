"""The shipped model: what its folder holds, how it reads and writes text, and that it has a skill it uses too seldom.

The recipe that made it (scripts/train_embedded_model.py) is checked where a mistake would not show in the loss.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

import qerl
from qerl.tasks.arithmetic import ArithmeticTask, is_held_out, solve, worked_solution
from qerl.tasks.chat import encode_prompt

FOLDER = Path(qerl.__file__).parent / "embedded"
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_embedded_model.py"


def load_recipe():
    spec = importlib.util.spec_from_file_location("train_embedded_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe = load_recipe()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def nvfp4_model() -> Qwen2ForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for linear in recipe.quantized_linears(model):
        linear.weight.data = recipe.nvfp4_values(linear.weight.data)
    return model


# The folder


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 10e6


def test_shapes_suit_the_kernels(model):
    linears = recipe.quantized_linears(model)
    assert len(linears) == 7 * model.config.num_hidden_layers
    for linear in linears:
        assert linear.out_features % 128 == 0
        assert linear.in_features % 64 == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_are_stored_in_bf16():
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_end_token_is_named_and_is_not_the_pad_token(model, tokenizer):
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


# The tokenizer


@given(st.text(alphabet=st.characters(codec="ascii")))
def test_ascii_is_one_token_a_character_and_comes_back_exactly(text):
    tokenizer = recipe.build_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_other_text_comes_back_too(tokenizer):
    text = "naïve 漢字 🙂\t1½\r\n  two  spaces , and 's"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tags_are_single_tokens_that_decoding_keeps(tokenizer):
    text = "<think>12+7=19</think>\n<answer>19</answer>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len("12+7=19") + len("\n") + len("19") + 4
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_the_shipped_tokenizer_is_the_recipes(tokenizer):
    assert tokenizer.get_vocab() == recipe.build_tokenizer().get_vocab()
    assert tokenizer.chat_template == recipe.build_tokenizer().chat_template


def test_a_prompt_is_what_the_corpus_was_written_with(tokenizer):
    for example in ArithmeticTask(difficulty=2, seed=0).eval_examples(50):
        assert example.prompt[0]["role"] == "system"  # not rendered: the model cannot read it
        ids = encode_prompt(tokenizer, example)
        assert tokenizer.decode(ids) == f"<|user|>{example.columns['problem']}<|assistant|>"
        assert len(ids) <= 20


def test_a_whole_conversation_renders(tokenizer):
    chat = [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>1+1=?<|assistant|>2<|end|><|user|>?<|assistant|>"


# What the model can do


def test_it_is_right_sometimes_but_not_often(nvfp4_model, tokenizer):
    torch.manual_seed(0)
    sampled = recipe.accuracy(nvfp4_model, tokenizer, 2, 200, greedy=False)
    greedy = recipe.accuracy(nvfp4_model, tokenizer, 2, 200, greedy=True)
    assert 0.25 <= sampled <= 0.45
    assert greedy <= 0.65


def test_it_can_do_better_once_it_starts_to_work_in_steps(nvfp4_model, tokenizer):
    examples = ArithmeticTask(difficulty=2, seed=0).eval_examples(100)
    long = [example for example in examples if len(re.findall(r"[+-]", example.columns["problem"])) == 3]
    assert len(long) >= 40
    # The first step up to its equals sign, a beginning that greedy decoding does not take on long sums.
    starts = [worked_solution(e.columns["problem"]).split("=")[0] + "=" for e in long]
    ids = [
        encode_prompt(tokenizer, example) + tokenizer(start)["input_ids"]
        for example, start in zip(long, starts, strict=True)
    ]
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    output = nvfp4_model.generate(**inputs, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    completions = [start + text for start, text in zip(starts, texts, strict=True)]
    right = [c == worked_solution(e.columns["problem"]) for c, e in zip(completions, long, strict=True)]
    assert sum(right) >= 0.9 * len(long)


# The recipe


def test_documents_come_from_training_problems_and_are_not_cut():
    tokenizer = recipe.build_tokenizer()
    rows = torch.from_numpy(recipe.write_chunk(seed=3, chunk=1, habits=recipe.Habits(), num_documents=500)).long()
    text = "".join(tokenizer.batch_decode(rows)).replace("<|pad|>", "")
    documents = re.findall(r"<\|user\|>([^<]*)<\|assistant\|>((?:(?!<\|).)*)<\|end\|>", text)
    assert len(documents) == 500
    assert sum(len(problem) + len(solution) for problem, solution in documents) + 500 * len(
        "<|user|><|assistant|><|end|>"
    ) == len(text)
    assert not any(is_held_out(problem) for problem, _ in documents)


def test_a_writer_without_bad_habits_is_right():
    rng = random.Random(0)
    good = recipe.Habits(guess=(0.0,) * 5, slip=0.0, forgotten_tag=0.0)
    for problem in ("12+7-4=?", "5-5=?", "99+99+99-1+1-90=?"):
        assert recipe.write_solution(problem, good, rng) == worked_solution(problem)


def test_a_slip_is_carried_on():
    slips = recipe.Habits(guess=(0.0,) * 5, slip=1.0, forgotten_tag=0.0)
    text = recipe.write_solution("50+7-4=?", slips, random.Random(0))
    first, second, answer = re.fullmatch(r"<think>50\+7=(\d+) \1-4=(\d+)</think><answer>(\d+)</answer>", text).groups()
    assert abs(int(first) - 57) in (1, 10)
    assert abs(int(second) - (int(first) - 4)) in (1, 10)
    assert answer == second


def test_guesses_are_near_and_mostly_wrong():
    rng = random.Random(0)
    guesses = recipe.Habits(guess=(1.0,) * 5, forgotten_tag=0.0)
    problem = "90+90+90-7=?"
    texts = [recipe.write_solution(problem, guesses, rng) for _ in range(500)]
    answers = [int(re.fullmatch(r"<think>90\+90\+90-7=(\d+)</think><answer>\1</answer>", text)[1]) for text in texts]
    errors = torch.tensor(answers).float() - solve(problem)[1]
    assert errors.std().item() == pytest.approx(guesses.guess_error, rel=0.15)
    assert (errors == 0).float().mean() < 0.15


def test_packed_documents_do_not_see_each_other(model, tokenizer):
    row = torch.from_numpy(recipe.write_chunk(seed=0, chunk=0, habits=recipe.Habits(), num_documents=20))[:1].long()
    user, assistant, pad = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|pad|>"])
    positions, mask, learnt = recipe.unpack(row, user, assistant, pad)
    with torch.inference_mode():
        packed = model(input_ids=row, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
        starts = (row[0] == user).nonzero().flatten().tolist()
        assert len(starts) > 3
        for start, stop in pairwise(starts):
            alone = model(input_ids=row[:, start:stop], use_cache=False).logits[0]
            torch.testing.assert_close(packed[start:stop], alone, atol=1e-4, rtol=1e-4)
    text = tokenizer.decode(row[0, learnt[0]])
    assert text == "".join(re.findall(r"<\|assistant\|>(.*?<\|end\|>)", tokenizer.decode(row[0])))


def test_rounding_is_seen_forward_and_not_backward():
    linear = nn.Linear(64, 128, bias=False)
    before = linear.weight.detach().clone()
    nn.utils.parametrize.register_parametrization(linear, "weight", recipe.NVFP4Rounding())
    torch.testing.assert_close(linear.weight, recipe.nvfp4_values(before), atol=1e-7, rtol=0)
    assert not torch.allclose(linear.weight, before, atol=1e-4)
    (linear.weight * 3).sum().backward()
    assert (linear.parametrizations.weight.original.grad == 3).all()


def test_training_learns_and_leaves_plain_weights(capsys):
    torch.manual_seed(0)
    corpus = torch.from_numpy(recipe.write_chunk(seed=0, chunk=0, habits=recipe.Habits(), num_documents=20))
    tokenizer = recipe.build_tokenizer()
    model = recipe.build_model(tokenizer)
    options = {"steps": 8, "rows_per_step": 2, "learning_rate": 2e-3, "rounded_share": 0.5, "seed": 0}
    recipe.train(model, tokenizer, corpus, **options)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[0] > 5  # ln 264 = 5.58
    assert losses[-1] < losses[0] - 1.5
    assert not any("parametrizations" in name for name, _ in model.named_parameters())
    weight = recipe.quantized_linears(model)[0].weight
    assert not torch.equal(weight, recipe.nvfp4_values(weight))

"""Train the small model that ships in `src/qerl/embedded`, from scratch, and write its folder.

    problem -> a writer's solution -> byte tokens -> next-token loss on the solution -> bf16 safetensors
    12+7-4=?   <think>12+7=19 19-4=15</think><answer>15</answer>

The text comes from writers who can all add, and differ in habits (`Habits`): on long sums most write a guess instead of
working step by step, now and then a digit slips in a step, and some forget a tag. So the model has a skill that it uses
too seldom, which is what reinforcement learning with a verifiable reward can find and strengthen. Decoding greedily
does not find it: on long sums the guess is the most likely course.

The skill has to survive in NVFP4, so in the last part of the training the forward pass sees NVFP4-rounded weights
(straight-through gradient, arXiv 1308.3432).

Only training problems of `qerl.tasks.arithmetic` are used, of difficulties 1 to 3; the printed accuracies are those of
held-out ones. Two minutes on an H200, hours on a CPU.

    python scripts/train_embedded_model.py --output src/qerl/embedded
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qerl.formats.nvfp4 import dequantize, quantize
from qerl.tasks.arithmetic import ArithmeticTask, solve, train_problem
from qerl.tasks.chat import encode_prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CONTROL_TOKENS = PAD, END, USER, ASSISTANT = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")

# The system message is left out on purpose: a model of this size cannot read it, and each of its tokens costs time.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<|user|>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<|assistant|>' + message['content'] + '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

DIFFICULTIES = {1: 0.15, 2: 0.6, 3: 0.25}
"""Share of the documents of each difficulty."""

CHUNK = 20_000
"""Documents that one task of the process pool writes; part of the recipe, because each chunk has its own seed."""

ROW = 256
"""Tokens of a packed row: about eight documents."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How the writers of the corpus go about a problem."""

    guess: tuple[float, ...] = (0.2, 0.48, 0.68, 0.75, 0.8)
    """Probability of `12+7-4=` and a guess, with no steps, for sums of 2, 3, 4, 5 and 6 numbers."""
    guess_error: float = 5.0
    """Standard deviation of a guess."""
    slip: float = 0.06
    """Probability that a step's result is off by 1 or 10; the writer goes on with the wrong number."""
    forgotten_tag: float = 0.04
    """Probability that one of the four tags is missing."""


# ---------------------------------------------------------------------------------------------------------- the text


def write_solution(problem: str, habits: Habits, rng: random.Random) -> str:
    """Write one writer's completion for `problem`, a chain of sums and differences such as `12+7-4=?`."""
    first, *rest = re.findall(r"\d+|[+-]", problem)
    operations = list(zip(rest[0::2], map(int, rest[1::2]), strict=True))
    if rng.random() < habits.guess[len(operations) - 1]:
        total = max(0, solve(problem)[1] + round(rng.gauss(0, habits.guess_error)))
        steps = [problem.replace("?", str(total))]
    else:
        total, steps = int(first), []
        for sign, number in operations:
            result = total + number if sign == "+" else total - number
            if rng.random() < habits.slip:
                result += rng.choice((-10, -1, 1, 10))
            result = max(0, result)
            steps.append(f"{total}{sign}{number}={result}")
            total = result
    parts = [TAGS[0], " ".join(steps), TAGS[1], TAGS[2], str(total), TAGS[3]]
    if rng.random() < habits.forgotten_tag:
        parts.remove(rng.choice(TAGS))
    return "".join(parts)


def write_chunk(seed: int, chunk: int, habits: Habits, num_documents: int = CHUNK) -> Int16[np.ndarray, "rows t"]:
    """Write documents and pack them into rows of `ROW` token ids, padded at the end; no document is cut."""
    rng = random.Random(f"{seed}/{chunk}")
    tokenizer = build_tokenizer()
    levels = rng.choices(list(DIFFICULTIES), weights=list(DIFFICULTIES.values()), k=num_documents)
    problems = [train_problem(level, seed, chunk * CHUNK + i) for i, level in enumerate(levels)]
    texts = [f"{USER}{problem}{ASSISTANT}{write_solution(problem, habits, rng)}{END}" for problem in problems]
    rows: list[list[int]] = [[]]
    for ids in tokenizer(texts, return_attention_mask=False)["input_ids"]:
        if len(rows[-1]) + len(ids) > ROW:
            rows.append([])
        rows[-1] += ids
    packed = np.full((len(rows), ROW), tokenizer.pad_token_id, dtype=np.int16)
    for packed_row, row in zip(packed, rows, strict=True):
        packed_row[: len(row)] = row
    return packed


def build_corpus(num_documents: int, seed: int, habits: Habits) -> Int16[Tensor, "rows t"]:
    """Write `num_documents` documents, rounded up to whole chunks, with all CPU cores."""
    num_chunks = -(-num_documents // CHUNK)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        chunks = list(pool.map(write_chunk, [seed] * num_chunks, range(num_chunks), [habits] * num_chunks))
    return torch.from_numpy(np.concatenate(chunks))


# ------------------------------------------------------------------------------------------- the tokenizer, the model


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE without merges: 256 bytes, the four tags, four control tokens; any text survives a round trip.

    transformers loads every folder of model type qwen2 as a Qwen2Tokenizer, whatever class the folder names, so this is
    one. The tags are ordinary tokens: decoding with skip_special_tokens keeps them.
    """
    characters = bytes_to_unicode()
    vocab = {characters[byte]: byte for byte in range(256)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], unk_token=None, eos_token=None, pad_token=None)
    for special, tokens in ((False, TAGS), (True, CONTROL_TOKENS)):
        added = [AddedToken(token, special=special, normalized=False) for token in tokens]
        tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.pad_token, tokenizer.eos_token = PAD, END
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 of 2.4 M parameters; N of each linear layer is a multiple of 128, K one of 64."""
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return model


def nvfp4_values(weight: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return what NVFP4 makes of a weight, with the scales that cost least time to find."""
    return dequantize(quantize(weight, scale="amax"), dtype=weight.dtype)


class NVFP4Rounding(nn.Module):
    """Parametrisation of a linear layer's weight: NVFP4 values forward, the identity backward."""

    def forward(self, weight: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Round."""
        with torch.no_grad():
            error = nvfp4_values(weight) - weight
        return weight + error


def quantized_linears(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that NVFP4 stores: all linear ones but the head, which is tied to the embedding."""
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.endswith("lm_head")]


# ------------------------------------------------------------------------------------------------------- the training


def unpack(
    ids: Int[Tensor, "b t"], user: int, assistant: int, pad: int
) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b 1 t t"], Bool[Tensor, "b t"]]:
    """Return, for packed rows: positions within each document, the attention mask, and which tokens are to be learnt.

    A document begins with the user token, attends to itself alone, and is learnt after the assistant token.
    """
    starts = ids == user
    document = starts.cumsum(1)
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = column - torch.where(starts, column, 0).cummax(1).values
    mask = (document[:, :, None] == document[:, None, :]).tril()
    answered = (ids == assistant).cumsum(1) == document
    return positions, mask[:, None], answered & (ids != assistant) & (ids != pad)


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    corpus: Int16[Tensor, "rows t"],
    *,
    steps: int,
    rows_per_step: int,
    learning_rate: float,
    rounded_share: float,
    seed: int,
) -> None:
    """Minimise the mean next-token loss of the solutions; the last `rounded_share` of the steps sees NVFP4 weights."""
    device = model.device
    corpus = corpus.to(device)
    user, assistant, pad = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, PAD])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))
    warmup = max(1, steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    began = time.perf_counter()
    for step in range(steps):
        if step == round(steps * (1 - rounded_share)):
            for linear in quantized_linears(model):
                parametrize.register_parametrization(linear, "weight", NVFP4Rounding())
        if len(order) < rows_per_step:
            order = torch.cat([order, torch.randperm(len(corpus), generator=generator)])
        ids = corpus[order[:rows_per_step].to(device)].long()
        order = order[rows_per_step:]
        positions, mask, learnt = unpack(ids, user, assistant, pad)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        targets = torch.where(learnt, ids, -100)[:, 1:]
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - began:6.1f} s", flush=True)
    for linear in quantized_linears(model):
        if parametrize.is_parametrized(linear):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)


# --------------------------------------------------------------------------------------------------------- the checks


@torch.inference_mode()
def accuracy(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, difficulty: int, num_problems: int, *, greedy: bool
) -> float:
    """Return the share of held-out problems answered right, sampled at temperature 1 or greedily."""
    task = ArithmeticTask(difficulty=difficulty, seed=0)
    examples = task.eval_examples(num_problems)
    prompts = {"input_ids": [encode_prompt(tokenizer, example) for example in examples]}
    inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=72, do_sample=not greedy)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    grades = task.grade_batch(texts, [example.columns for example in examples])
    return sum(grade is True for grade in grades) / num_problems


def print_accuracies(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, num_problems: int) -> None:
    """Print a table of accuracies with the model's weights, and with their NVFP4 values, which stay in the model."""
    for weights in ("bf16", "nvfp4"):
        if weights == "nvfp4":
            for linear in quantized_linears(model):
                linear.weight.data = nvfp4_values(linear.weight.data)
        for difficulty in DIFFICULTIES:
            sampled, greedy = (
                accuracy(model, tokenizer, difficulty, num_problems, greedy=greedy) for greedy in (False, True)
            )
            print(f"{weights:5}  difficulty {difficulty}  sampled {sampled:.3f}  greedy {greedy:.3f}", flush=True)


def main() -> None:
    """Write the corpus, train, save, measure. The defaults are the recipe of the shipped weights."""
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--documents", type=int, default=1_000_000, help="size of the corpus")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows-per-step", type=int, default=256, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak, between warmup and linear decay")
    parser.add_argument("--rounded-share", type=float, default=0.3, help="share of steps with NVFP4 weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eval-problems", type=int, default=1000, help="held-out problems of each difficulty")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    corpus = build_corpus(options.documents, options.seed, Habits())
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{len(corpus)} rows of {ROW} tokens, {model.num_parameters()} parameters", flush=True)
    train(
        model.to(options.device),
        tokenizer,
        corpus,
        steps=options.steps,
        rows_per_step=options.rows_per_step,
        learning_rate=options.learning_rate,
        rounded_share=options.rounded_share,
        seed=options.seed,
    )
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    # Measured on the saved, rounded weights, with float32 activations.
    print_accuracies(model.float().eval(), tokenizer, options.eval_problems)


if __name__ == "__main__":
    main()

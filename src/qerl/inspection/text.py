"""What rounding the weights does to a model's next-token distributions on given text, by position in the context.

    KL         sum_v p_v (log p_v - log q_v)          p: the reference, q: the model; nats a token
    agreement  argmax p = argmax q
    entropy    -sum_v p_v log p_v, and of q           rounding errors flatten a policy or sharpen it: the difference
    nll        -log p(next token of the text)         exp of its mean is the perplexity

The text is cut into windows of one length that know nothing of each other: position t is the distribution after t + 1
tokens of a window. Both models run as in training (nn/attention.py: packed sequences), layer by layer (nn/stream.py):
the hidden states of all tokens are kept, their logits are made a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from qerl.nn.attention import packed_forward
from qerl.nn.load import Base, load_tokenizer
from qerl.nn.stream import streamed
from qerl.nn.structure import decoder_layers, head, max_positions

MEASURES = ("kl", "agreement", "entropy", "reference_entropy", "nll", "reference_nll")
"""Columns of a TextComparison."""

_CHUNK = 128  # tokens whose logits exist at a time: a few float32 [128, V] for each model


@dataclass(frozen=True)
class TextComparison:
    """Means over windows, in nats (agreement: a share)."""

    file: Path
    num_windows: int
    num_tokens: int
    by_position: dict[str, list[float]]
    """A list a measure; `nll`'s are one shorter, since no token follows the last."""
    mean: dict[str, float]
    """Over all tokens."""


def compare_text(
    model: Base,
    reference: Base,
    file: Path,
    *,
    length: int,
    max_windows: int,
    progress: Callable[[int, int], None] | None = None,
) -> TextComparison:
    """Both models on the first `max_windows` windows of `length` tokens of a text file. Serves a Base once.

    progress: told how many of how many layers, of both models, have run.
    ValueError: a file that is no UTF-8 text or has fewer than two tokens, a length beyond the model's context.
    """
    windows = windows_for(model, file, length, max_windows)
    sizes = [len(window) for window in windows]
    ids = torch.tensor([token for window in windows for token in window], device=model.device)
    ends = torch.tensor([0, *sizes], device=model.device).cumsum(0)
    num_layers = [len(decoder_layers(base.model)) for base in (model, reference)]
    done = count(1)

    def layer_ended(*_: Any) -> None:
        if progress is not None:
            progress(next(done), sum(num_layers))

    with torch.no_grad():
        ours, our_head = _hidden(model, ids, ends, layer_ended)
        theirs, their_head = _hidden(reference, ids, ends, layer_ended)
        if our_head.weight.shape != their_head.weight.shape:
            raise ValueError(f"{reference.folder} has another vocabulary than {model.folder}")
        return _compare(file, ids, sizes, (ours, our_head), (theirs, their_head))


def windows_for(base: Base, file: Path, length: int, most: int) -> list[list[int]]:
    """`read_windows` with the model's tokenizer. ValueError, too: a window is beyond the model's context."""
    windows = read_windows(file, load_tokenizer(base.folder, base.config.trust_remote_code), length, most)
    longest = max_positions(base.model)
    if longest is not None and len(windows[0]) > longest:
        raise ValueError(f"--length {length} is beyond the model's context of {longest} tokens")
    return windows


def read_windows(file: Path, tokenizer: PreTrainedTokenizerBase, length: int, most: int) -> list[list[int]]:
    """The text's first windows, each beginning as the tokenizer begins a text; one shorter one where it is short."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = tokenizer(text[:1])["input_ids"][:1]
    start = first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []
    step = length - len(start)
    windows = [start + ids[i : i + step] for i in range(0, len(ids), step)][:most]
    whole = [window for window in windows if len(window) == length] or windows[:1]
    if not whole or len(whole[0]) < 2:
        raise ValueError(f"{file} has {len(ids)} tokens: give a longer text")
    return whole


def _hidden(
    base: Base, ids: Int[Tensor, " t"], ends: Int[Tensor, " b1"], layer_ended: Callable[..., None]
) -> tuple[Float[Tensor, "t h"], nn.Linear]:
    """Hidden states after the final norm, and the head that they go through."""
    with streamed(base) as model:
        for layer in decoder_layers(model):
            layer.register_forward_hook(layer_ended)
        return packed_forward(model, ids, ends), head(model)


def _compare(
    file: Path,
    ids: Int[Tensor, " t"],
    sizes: list[int],
    model: tuple[Float[Tensor, "t h"], nn.Linear],
    reference: tuple[Float[Tensor, "t h"], nn.Linear],
) -> TextComparison:
    total = len(ids)
    positions = torch.cat([torch.arange(size) for size in sizes])
    followed = torch.cat([torch.arange(size) < size - 1 for size in sizes])
    targets = ids.roll(-1)  # of a window's last token: another window's first, which is left out below
    columns: dict[str, list[Tensor]] = {measure: [] for measure in MEASURES}
    for start in range(0, total, _CHUNK):
        part = slice(start, start + _CHUNK)
        q, p = (F.log_softmax(linear(hidden[part]).float(), dim=-1) for hidden, linear in (model, reference))
        values = {
            "kl": (p.exp() * (p - q)).sum(-1),
            "agreement": (p.argmax(-1) == q.argmax(-1)).float(),
            "entropy": -(q.exp() * q).sum(-1),
            "reference_entropy": -(p.exp() * p).sum(-1),
            "nll": -q.gather(-1, targets[part, None]).squeeze(-1),
            "reference_nll": -p.gather(-1, targets[part, None]).squeeze(-1),
        }
        for measure, value in values.items():
            columns[measure].append(value.double().cpu())
    by_position, mean = {}, {}
    for measure, pieces in columns.items():
        rows = torch.cat(pieces)
        counted = followed if measure.endswith("nll") else torch.ones_like(followed)
        where, rows = positions[counted], rows[counted]
        counts = torch.bincount(where)
        by_position[measure] = (torch.bincount(where, weights=rows) / counts).tolist()
        mean[measure] = rows.mean().item()
    return TextComparison(file, len(sizes), total, by_position, mean)

"""From chat messages to the token ids of a prompt, and from sampled token ids to text."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from qerl.types import Example


def encode_prompt(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """Token ids of the chat, ending with the header that opens the assistant's turn.

    Raises ValueError for a tokenizer without a chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "this tokenizer has no chat template: use an instruction-tuned model, or add chat_template.jinja to its "
            "folder"
        )
    text = tokenizer.apply_chat_template(example.prompt, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Text of a completion, without special tokens. For graders and readers only: it is never encoded again."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text

"""The wording of a prompt, and the tags that a completion is read by.

    system: solve step by step, reasoning in <think> </think>, the answer in <answer> </answer>
    user:   the problem
    assistant (sampled): <think>reasoning</think><answer>final answer</answer>

The prompt asks for exactly the format that `has_format` rewards. What stands between the answer tags is a grader's
business, see `numbers.py`.
"""

from __future__ import annotations

import re

SYSTEM_PROMPT = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, "
    "then only the final answer between <answer> and </answer>."
)

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# A body never runs over another tag, so that both patterns take time linear in the text.
_BODY = r"((?:(?!</?(?:think|answer)>).)*)"
_ANSWER = re.compile(rf"<answer>{_BODY}</answer>", re.DOTALL)
_FORMAT = re.compile(rf"\s*<think>{_BODY}</think>\s*<answer>{_BODY}</answer>\s*", re.DOTALL)


def build_prompt(question: str, system: str | None = None) -> list[dict[str, str]]:
    """Return the chat messages of a problem; `system` replaces `SYSTEM_PROMPT`, and "" leaves the message out."""
    system = SYSTEM_PROMPT if system is None else system
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": question}]


def parse_answer(text: str) -> str | None:
    """Return what stands in the last complete `<answer>...</answer>`, stripped; None when there is none."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def has_format(text: str) -> bool:
    """Whether a completion is one think part and one answer part, neither blank, with nothing but space around them."""
    match = _FORMAT.fullmatch(text)
    return match is not None and all(body.strip() for body in match.groups())

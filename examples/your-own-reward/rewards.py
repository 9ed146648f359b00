"""Two rewards for sums: the right total, and work that is shown and true."""

import re


def right_total(completions, total, **kwargs):
    """Pay 1 where the answer is the number in the data's column `total`."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(f"<answer>{number}</answer>" in text) for text, number in zip(texts, total, strict=True)]


def true_steps(completions, **kwargs):
    """Pay the share of steps, such as 12+7=19, that are true; 0 where none is shown."""
    values = []
    for completion in completions:
        steps = re.findall(r"(\d+)([+-])(\d+)=(\d+)", completion[0]["content"])
        true = sum(int(a) + int(sign + b) == int(c) for a, sign, b, c in steps)
        values.append(true / len(steps) if steps else 0.0)
    return values

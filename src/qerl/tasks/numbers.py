r"""The numeric grader: does a completion state the right number?

    completion -> the answer's text -> the one number that it states, exact -> equal to the reference?

Two ways to find the answer's text:
* `parse_answer` (prompts.py), the rule of training and of accuracy: the last complete `<answer>...</answer>`.
* `tag_free`, for a fair look at a model that was not trained on the tags: tags, else the last `\boxed{}`, else what
  follows the last `####`, else the last number of the text. It accepts whatever the strict rule accepts.

Numbers are compared as fractions: `18.00` is 18 and `1/2` is 0.5, while 0.333 is not 1/3. Currency signs, thousands
separators, markdown, LaTeX spacing and units are read over. A percent sign goes by the data's policy: read over, as
GSM8K's references are written without it, or a division by 100. Of `3 * 6 = 18`, what follows the last equals sign
counts. A text that states two different numbers, or has any digit left that is not part of the one number, states
none: hedging is never right.

Spelled-out numbers ("two dozen"), expressions and symbols (`2\pi`) are not evaluated; they are not right.
"""

from __future__ import annotations

import re
from fractions import Fraction

from qerl.config import Percent
from qerl.tasks.prompts import parse_answer

_MAX_DIGITS = 30  # a longer run of digits is no answer to a word problem, and exact arithmetic on it has no bound

_NUMBER = re.compile(
    rf"""
    (?<![\w^/]) (?<![0-9][.,:])                     # not inside a word, a power, a quotient or another number
    (?P<sign> (?<![)\]}}%]) [-+] )?                 # a sign, not a difference
    (?:
        (?: (?P<whole>[0-9]{{1,{_MAX_DIGITS}}}) \s+ )?
        (?P<top>[0-9]{{1,{_MAX_DIGITS}}}) \s*/\s* (?P<bottom>[0-9]{{1,{_MAX_DIGITS}}})
      |
        (?P<decimal>
            (?: (?: [0-9]{{1,3}} (?: ,[0-9]{{3}} ){{1,9}} | [0-9]{{1,{_MAX_DIGITS}}} ) (?: \.[0-9]{{1,{_MAX_DIGITS}}} )?
              | (?<!\.) \.[0-9]{{1,{_MAX_DIGITS}}} )
            (?: [eE][-+]?[0-9]{{1,2}} )?
        )
    )
    (?! [0-9] | [.,:/^][0-9] | [eE][-+]?[0-9] | \s*/\s*[0-9] )
    """,
    re.VERBOSE,
)

# In this order; each takes time linear in the text.
_CLEANING: tuple[tuple[re.Pattern[str], str], ...] = (
    # minus sign and en dash; a hyphen keeps its space, which makes it a list's bullet and no sign
    (re.compile(r"\u2212\s*|\u2013"), "-"),
    (re.compile(r"½"), " 1/2 "),
    (re.compile(r"¼"), " 1/4 "),
    (re.compile(r"¾"), " 3/4 "),
    # thousands: 1{,}000 and 1\,000 of LaTeX, no-break and thin spaces of typesetting, and 1 000 with a plain space
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,|[\u00a0\u2009\u202f]|[ ](?=000))(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"([0-9])\s*(?=\\[dt]?frac)"), r"\1 "),
    (re.compile(r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
    (re.compile(r"\\approx|≈"), "="),
    # commands of type and space go, what they hold stays; any other (\sqrt, \cdot) makes an expression, marked by √
    (re.compile(r"\\(?:text|math|mbox|left|right|q?quad|displaystyle|circ|degree)[a-z]*|\\[(),;:! \[\]]"), " "),
    (re.compile(r"\\[A-Za-z]+|π"), " √ "),
    (re.compile(r"([-+])?\\?[$€£¥₹]\s*"), r" \1"),  # -$5 and $-5 are both -5
    (re.compile(r"([A-Za-z]\s*\}?)(?:\^\s*\{?\s*[0-9]\s*\}?|[²³])"), r"\1"),  # powers of units: m^2, m²
    (re.compile(r"[*_`{}~]"), " "),
)
_PERCENT_SIGN = re.compile(r"\s*\\?%")
_WORD = re.compile(r"[^\W\d_]\w*")  # begins with a letter, or with a sign such as ⅓, which is no word


def parse_number(text: str, percent: Percent = "ignore") -> Fraction | None:
    """Return the one number that an answer's text states, exact; None when it states none, or several."""
    boxed = last_boxed(text)
    cleaned = _clean(text if boxed is None else boxed).rsplit("=", 1)[-1]
    values = {_value(match, percent) for match in _NUMBER.finditer(cleaned)}
    leftover = _WORD.sub(lambda word: "" if word[0][0].isalpha() else word[0], _NUMBER.sub(" ", cleaned))
    if len(values) != 1 or any(character.isnumeric() or character == "√" for character in leftover):
        return None
    return values.pop()


def last_number(text: str, percent: Percent = "ignore") -> Fraction | None:
    """Return the last number that stands anywhere in a text."""
    matches = list(_NUMBER.finditer(_clean(text)))
    return _value(matches[-1], percent) if matches else None


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` holds; "" when its brace is never closed, None when there is no box."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return ""


def tag_free(text: str, percent: Percent = "ignore") -> Fraction | None:
    r"""Return the number that a completion gives as its answer: tags, else `\boxed{}`, else `####`, else the last one.

    A box that was opened and never closed holds no answer: the completion was cut off inside it.
    """
    answer = parse_answer(text)
    if answer is not None:
        return parse_number(answer, percent)
    if (boxed := last_boxed(text)) is not None:
        return parse_number(boxed, percent)
    _, mark, after = text.rpartition("####")
    if mark and (number := parse_number(after.strip().partition("\n")[0], percent)) is not None:
        return number
    return last_number(text, percent)


def grade(text: str, answer: str, *, require_tags: bool = True, percent: Percent = "ignore") -> bool | None:
    """Whether a completion states the number `answer`; None when the reference itself is no number.

    A completion without an answer, or whose answer is no single number, is wrong (False).
    """
    reference = parse_number(answer, percent)
    if reference is None:
        return None
    if not require_tags:
        return tag_free(text, percent) == reference
    stated = parse_answer(text)
    return stated is not None and parse_number(stated, percent) == reference


def _clean(text: str) -> str:
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str], percent: Percent) -> Fraction | None:
    if match["decimal"]:
        value = Fraction(match["decimal"].replace(",", ""))
    elif int(match["bottom"]) == 0:
        return None
    else:
        value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
    if percent == "fraction" and _PERCENT_SIGN.match(match.string, match.end()):
        value /= 100
    return -value if match["sign"] == "-" else value

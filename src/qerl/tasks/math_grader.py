r"""The math grader: is a completion's final answer the reference, as mathematics?

    completion -> its final answer -> cleaned -> `quick_verdict` -> the answer, or where it cannot tell: math_pool.py

The final answer is what the last complete `<answer>...</answer>` holds and, in it, the last `\boxed{}`. Without
`require_tags` it is, in this order: that, the last box, what follows the last `####`, what follows the last
"answer is" or "Answer:", the last number. A box that is never closed holds no answer.

`quick_verdict` decides by the text alone what needs no algebra, which is most of it: equal texts, two numbers, words,
choices. Numbers are exact: 3.14 is not 3.1416, and 0.333 is not 1/3, unless the reference says that it is rounded
(`\approx 3.14`: right is every number that rounds to it). All else (expressions, tuples, intervals, sets, matrices) is
compared by math-verify, which gets no decimals either.

* Sets and lists are without order; tuples have one; `\{1, 2\}` is no `(1, 2)`, and `[1, 2)` no `(1, 2)`.
* Units after a number are read over (`72 \text{ clips}`, `5 cm`, `90^\circ`), as are currency signs and thousands.
* A percent sign goes by the data's policy: "ignore" (50% is written for 50) or "fraction" (50% is 0.5).
* Words are compared without case and spaces; `(C)` and `\text{C}` are the choice C.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from qerl.config import Percent
from qerl.tasks.math_pool import MathPool, shared_pool
from qerl.tasks.numbers import last_boxed
from qerl.tasks.prompts import parse_answer

MAX_ANSWER_CHARACTERS = 1000  # no reference is nearly as long; an answer that is, is wrong

MAX_CONCLUSION_CHARACTERS = 2000  # of a completion's end, in which "answer is" is looked for

_SAID = re.compile(r"(?i)answer(?: is|:)[*: ]*(\S.*?)(?=\.?$|\. |\n)")
_LAST_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?%?")

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u00b1": r"\pm ",
        "\u2248": r"\approx ",
        "\u00b0": r"^\circ ",
        "\u00bd": r"\frac{1}{2}",
        "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)

# In this order; each takes time linear in the text.
_CLEANING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\*\*|__|`"), ""),  # markdown
    (re.compile(r"(?<!\\)\\[\[\]()]"), " "),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\(?:left|right|[Bb]igg?[lr]?|displaystyle|limits)(?![A-Za-z])|\\!"), ""),
    (re.compile(r"(?<!\\)\\(?:,|;|:| |quad\b|qquad\b)|~"), " "),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:mbox|textbf|textit|textrm|mathrm|mathbf)\s*\{"), r"\\text{"),
    (re.compile(r"(?:\bUS)?\\?[$€£¥₹]"), ""),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?\b"), ""),
)
_PERCENT = re.compile(r"(-?(?:\d[\d,]*\.?\d*|\.\d+))\s*\\?%")
_MEMBER_OF = re.compile(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_ROUNDED = re.compile(r"^(?:[A-Za-z]\s*)?=?\s*\\approx\s*")
_LEADING_WORDS = re.compile(r"(?i)^(?:the\s+)?(?:final\s+)?answer\s*(?:is|:)\s*:?\s*")

_NUMBER = re.compile(
    r"""
    (?P<sign>[-+])?\s*
    (?:
        (?P<decimal>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\.?|\.\d+)
      | (?:(?P<whole>\d+)\s*)?\\frac\{\s*(?P<top>-?\d+)\s*\}\{\s*(?P<bottom>\d+)\s*\}
      | (?:(?P<whole_plain>\d+)\s+)?(?P<top_plain>\d+)\s*/\s*(?P<bottom_plain>\d+)
    )
    """,
    re.VERBOSE,
)
_UNIT = re.compile(r"\s*(?:\\text\{[^{}]*\}|(?<=\s)[A-Za-z]{2,}(?:[ /-][A-Za-z]+)*)\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*\.?$")
# After a number these are mathematics or a second thought, never a unit.
_NO_UNIT = re.compile(r"(?i)\b(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|or|and|to|if|not|mod|choose)\b")
_BASE = re.compile(r"([0-9A-Za-z]+)_\{?(\d+)\}?")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-Z])\)?\.?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]\.?")
_VOWEL = re.compile(r"(?i)[aeiouy]")


def grade_math(
    texts: Sequence[str],
    references: Sequence[str],
    *,
    require_tags: bool = True,
    percent: Percent = "ignore",
    pool: MathPool | None = None,
) -> list[bool | None]:
    """Return whether each completion's final answer is its reference; None where the grader could not tell.

    An answer that is missing, longer than MAX_ANSWER_CHARACTERS, or no mathematics is wrong (False). None is for an
    answer that the comparison ran out of time or memory on, and for a reference that is itself no mathematics.
    """
    verdicts: list[bool | None] = []
    open_items: dict[int, tuple[str, str]] = {}
    for index, (text, reference) in enumerate(zip(texts, references, strict=True)):
        answer = final_answer(text, require_tags=require_tags)
        if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
            verdicts.append(False)
            continue
        answer, reference = clean(answer, percent), clean(reference, percent)
        verdicts.append(quick_verdict(answer, reference))
        if verdicts[-1] is None:
            open_items[index] = (answer, reference)
    if open_items:
        judged = (pool or shared_pool()).compare(list(open_items.values()))
        for index, verdict in zip(open_items, judged, strict=True):
            verdicts[index] = verdict
    return verdicts


def final_answer(text: str, *, require_tags: bool = True) -> str | None:
    """Return the text of a completion's final answer as the module's docstring says; None when it gives none."""
    answer = parse_answer(text)
    if answer is None and require_tags:
        return None
    boxed = last_boxed(text if answer is None else answer)
    if boxed is not None:
        while (inner := last_boxed(boxed)) is not None:
            boxed = inner
        return boxed.strip() or None
    if answer is not None:
        return answer or None
    _, mark, after = text.rpartition("####")
    if mark and (line := after.strip().partition("\n")[0].strip()):
        return line
    if said := _SAID.findall(text[-MAX_CONCLUSION_CHARACTERS:]):
        return said[-1].strip()
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def clean(text: str, percent: Percent) -> str:
    """Return an answer in one spelling: plain signs, no markup, currency, degrees or spacing commands."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    text = _PERCENT.sub(_hundredth if percent == "fraction" else r"\1", text)
    text = _LEADING_WORDS.sub("", re.sub(r"\\?%", "", text).strip())
    text = _MEMBER_OF.sub("", text).rstrip(" .,;:")
    return text.strip()


def quick_verdict(answer: str, reference: str) -> bool | None:
    """Return the verdict on two cleaned answers where the texts alone decide it, else None."""
    rounded = _ROUNDED.match(reference)
    if rounded:
        reference = reference[rounded.end() :]
    answer = _ROUNDED.sub("", answer)
    if not answer:
        return False
    if not rounded and _squeezed(answer) == _squeezed(reference):
        return True
    expected, said = exact_number(reference), exact_number(answer)
    if expected is not None and said is not None:
        if not rounded:
            return said == expected
        digits = len(reference.partition(".")[2])
        return abs(said - expected) <= Fraction(1, 2 * 10**digits)
    if (base := _BASE.fullmatch(reference)) and (other := _BASE.fullmatch(answer)):
        return base.groups() == other.groups()
    if (choice := _CHOICE.fullmatch(_untext(reference))) is not None:
        stated = _CHOICE.fullmatch(_untext(answer))
        if stated is not None:
            return stated[1] == choice[1]
    if _is_words(reference):
        return _folded(answer) == _folded(reference)
    kinds = _brackets(answer), _brackets(reference)
    if kinds[0] != kinds[1] and "{}" in kinds and "" not in kinds:
        return False  # a set is no tuple; a list without brackets may be either
    if "()" in kinds and "," in answer + reference and (expected if kinds[0] == "()" else said) is not None:
        return False  # a tuple or an interval is no number
    return None


def exact_number(text: str) -> Fraction | None:
    """Return the value of a cleaned answer that is one number, perhaps with a unit after it; else None."""
    match = _NUMBER.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    if rest.strip() and (not _UNIT.fullmatch(rest) or _NO_UNIT.search(rest)):
        return None
    if match["decimal"] is not None:
        value = Fraction(match["decimal"].replace(",", "").rstrip("."))
    else:
        top, bottom = match["top"] or match["top_plain"], match["bottom"] or match["bottom_plain"]
        if int(bottom) == 0:
            return None
        value = int(match["whole"] or match["whole_plain"] or 0) + Fraction(int(top), int(bottom))
    return -value if match["sign"] == "-" else value


def _hundredth(match: re.Match[str]) -> str:
    value = Fraction(match[1].replace(",", "").rstrip(".")) / 100
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


def _untext(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip()


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", _untext(text))


def _folded(text: str) -> str:
    return re.sub(r"[\s.'()-]+", "", _untext(text)).casefold()


def _is_words(text: str) -> bool:
    r"""Whether a reference is words: all of it in `\text{}`, or three letters or more that can be pronounced."""
    inner = _TEXT.fullmatch(text)
    if inner is not None:
        return _WORDS.fullmatch(inner[1].strip()) is not None
    return len(text) >= 3 and _WORDS.fullmatch(text) is not None and _VOWEL.search(text) is not None


def _brackets(text: str) -> str:
    """Return the kind of brackets around a whole answer: "{}" for a set, "()" for tuples and intervals, "" for none."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "{}"
    return "()" if text[:1] in ("(", "[") and text[-1:] in (")", "]") else ""

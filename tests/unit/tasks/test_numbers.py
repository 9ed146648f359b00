r"""The numeric grader: a table of graded answers, and properties that no table can hold."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.tasks.numbers import grade, last_boxed, last_number, parse_number, tag_free

RIGHT = True
WRONG = False

# What stands between the answer tags, the reference, and the verdict.
GRADED = [
    # plain numbers
    ("72", "72", RIGHT),
    (" 72\n", "72", RIGHT),
    ("73", "72", WRONG),
    ("0", "0", RIGHT),
    ("-0", "0", RIGHT),
    ("+5", "5", RIGHT),
    ("007", "7", RIGHT),
    ("025", "25", RIGHT),
    ("18.", "18", RIGHT),
    ("18.00", "18", RIGHT),
    ("18.0", "18.00", RIGHT),
    (".5", "0.5", RIGHT),
    ("0.50", "0.5", RIGHT),
    ("1e3", "1000", RIGHT),
    ("1.5E-2", "0.015", RIGHT),
    ("", "0", WRONG),
    ("none", "0", WRONG),
    ("seventy-two", "72", WRONG),
    # near is not equal
    ("0.333", "1/3", WRONG),
    ("0.3333333333333333", "1/3", WRONG),
    ("17.9999999999", "18", WRONG),
    ("18.000000001", "18", WRONG),
    ("9007199254740993", "9007199254740992", WRONG),  # equal as floats
    ("0.1", "0.10000000000000001", WRONG),  # equal as floats
    ("720", "72", WRONG),
    ("172", "72", WRONG),
    # negative numbers
    ("-5", "-5", RIGHT),
    ("-5", "5", WRONG),
    ("5", "-5", WRONG),
    ("\u22125", "-5", RIGHT),
    ("\u2212 5", "-5", RIGHT),
    ("-$5", "-5", RIGHT),
    ("$-5", "-5", RIGHT),
    ("x = -5", "-5", RIGHT),
    ("- 5 apples", "5", RIGHT),  # a list's bullet
    # thousands
    ("1,000", "1000", RIGHT),
    ("1000", "1,000", RIGHT),
    ("1,234,567.50", "1234567.5", RIGHT),
    ("1{,}000", "1000", RIGHT),
    (r"1\,000", "1000", RIGHT),
    ("1\u00a0000", "1000", RIGHT),
    ("118 000", "118000", RIGHT),
    ("1,000", "1", WRONG),
    ("1,00", "100", WRONG),
    ("1,0000", "10000", WRONG),
    ("1,5", "1.5", WRONG),
    # currencies, percent signs, units
    ("$1,000", "1000", RIGHT),
    ("$ 5.50", "5.5", RIGHT),
    (r"\$18", "18", RIGHT),
    ("18 $", "18", RIGHT),
    ("US$5", "5", RIGHT),
    ("€12", "12", RIGHT),
    ("50%", "50", RIGHT),  # GSM8K writes its references without the sign
    (r"50\%", "50", RIGHT),
    ("50%", "0.5", WRONG),
    ("72 clips", "72", RIGHT),
    ("18kg", "18", RIGHT),
    ("$10/hour", "10", RIGHT),
    ("60 km/h", "60", RIGHT),
    ("18 m^2", "18", RIGHT),
    ("18 m\u00b2", "18", RIGHT),
    (r"18\text{ m}^{2}", "18", RIGHT),
    ("the 5th", "5", RIGHT),
    ("H2O", "2", WRONG),
    # sentences and markdown
    ("The answer is 72.", "72", RIGHT),
    ("Answer: 5", "5", RIGHT),
    ("72!", "72", RIGHT),
    ("**73**", "73", RIGHT),
    ("__73__", "73", RIGHT),
    ("`73`", "73", RIGHT),
    ("*73* clips", "73", RIGHT),
    ("# 73", "73", RIGHT),
    ("(72)", "72", RIGHT),
    # LaTeX
    (r"\boxed{72}", "72", RIGHT),
    (r"\boxed{72 clips}", "72", RIGHT),
    (r"\boxed{72 \text{ clips}}", "72", RIGHT),
    (r"$\boxed{\frac{1}{2}}$", "0.5", RIGHT),
    (r"\boxed{\boxed{72}}", "72", RIGHT),
    (r"\boxed{72", "72", WRONG),  # never closed: cut off
    (r"\boxed{}", "0", WRONG),
    (r"$18$", "18", RIGHT),
    (r"\(18\)", "18", RIGHT),
    (r"\[ 18 \]", "18", RIGHT),
    (r"\mathbf{18}", "18", RIGHT),
    # fractions
    ("1/2", "0.5", RIGHT),
    ("0.5", "1/2", RIGHT),
    ("2/4", "1/2", RIGHT),
    ("1 / 2", "0.5", RIGHT),
    ("-1/2", "-0.5", RIGHT),
    ("1 1/2", "1.5", RIGHT),
    ("-1 1/2", "-1.5", RIGHT),
    ("1\u00bd", "1.5", RIGHT),
    (r"\frac{3}{4}", "0.75", RIGHT),
    (r"-\dfrac{3}{4}", "-0.75", RIGHT),
    (r"1\tfrac{1}{2}", "1.5", RIGHT),
    (r"\frac12", "0.5", RIGHT),
    ("3/4 cup", "0.75", RIGHT),
    ("11/2", "1.5", WRONG),
    ("5/0", "5", WRONG),
    ("1/2/2020", "1/2", WRONG),
    ("1.5/2", "1.5", WRONG),
    # of an equation, the right side counts
    ("3 * 6 = 18", "18", RIGHT),
    ("18 = 3 * 6", "18", WRONG),
    ("x = 18", "18", RIGHT),
    ("17.9 ≈ 18", "18", RIGHT),
    (r"17.9 \approx 18", "18", RIGHT),
    ("18 =", "18", WRONG),
    # hedging, lists, expressions and symbols are no answer
    ("18 or 20", "18", WRONG),
    ("18 or 20", "20", WRONG),
    ("18, 20", "18", WRONG),
    ("18,20", "18", WRONG),
    ("1,2,3", "3", WRONG),
    ("10-12", "10", WRONG),
    ("10\u201312", "12", WRONG),
    ("3*4", "12", WRONG),
    (r"3\cdot4", "3", WRONG),
    ("10^3", "10", WRONG),
    ("2^{10}", "2", WRONG),
    (r"2\pi", "2", WRONG),
    ("2π", "2", WRONG),
    (r"3\sqrt{2}", "3", WRONG),
    ("√4", "4", WRONG),
    (r"\frac{x}{2}", "2", WRONG),
    (r"\log{2}", "2", WRONG),
    (r"90^\circ", "90", RIGHT),
    (r"\left(18\right)", "18", RIGHT),
    (r"6 \times 3 = 18", "18", RIGHT),
    ("10:30", "10", WRONG),
    ("1.2.3", "1.2", WRONG),
    ("1\u2153", "1", WRONG),
    ("72 (72.00)", "72", RIGHT),  # the same number twice
    # numbers made to do harm
    ("1e999999999", "1", WRONG),
    ("9" * 31, "9", WRONG),
    ("1e99", "1", WRONG),
]


@pytest.mark.parametrize(("answer", "reference", "verdict"), GRADED)
def test_graded_answers(answer, reference, verdict):
    assert grade(f"<think>so</think><answer>{answer}</answer>", reference) is verdict


def test_the_table_is_large():
    assert len(GRADED) >= 80
    assert sum(verdict is WRONG for *_, verdict in GRADED) >= 40


# Whole completions: graded by the tags alone, and without them.
COMPLETIONS = [
    ("<think>48/2=24, 48+24=72</think><answer>72</answer>", "72", RIGHT, RIGHT),
    ("<answer>7</answer> no, <answer>72</answer>", "72", RIGHT, RIGHT),
    ("<answer>72</answer> no, <answer>7</answer>", "72", WRONG, WRONG),
    ("<answer>72</answer> and 3 more", "72", RIGHT, RIGHT),
    ("<answer>7</answer> 72", "72", WRONG, WRONG),
    ("<answer>72 or 73</answer> 72", "72", WRONG, WRONG),
    ("<answer>72", "72", WRONG, RIGHT),
    ("72</answer>", "72", WRONG, RIGHT),
    ("", "72", WRONG, WRONG),
    ("I do not know.", "72", WRONG, WRONG),
    ("She sold 48 + 24 = 72 clips.", "72", WRONG, RIGHT),
    ("It is 72. Of them 24 were sold in May.", "72", WRONG, WRONG),
    (r"Hence \boxed{72} clips in 2 months.", "72", WRONG, RIGHT),
    (r"\boxed{24} and then \boxed{72}", "72", WRONG, RIGHT),
    (r"\boxed{72} and then \boxed{24", "72", WRONG, WRONG),
    (r"\boxed{7", "7", WRONG, WRONG),
    ("48/2 = <<48/2=24>>24\n#### 72", "72", WRONG, RIGHT),
    ("#### 1,000\n\nLet me know if 2 things are unclear.", "1000", WRONG, RIGHT),
    ("#### 24\n#### 72 clips", "72", WRONG, RIGHT),
    ("#### Answer\nIt is 72.", "72", WRONG, RIGHT),
    ("**Answer: $1,000.00**", "1000", WRONG, RIGHT),
]


@pytest.mark.parametrize(("text", "reference", "tagged", "free"), COMPLETIONS)
def test_graded_completions(text, reference, tagged, free):
    assert grade(text, reference) is tagged
    assert grade(text, reference, require_tags=False) is free


@pytest.mark.parametrize("reference", ["", "two", "1 or 2", r"\frac{x}{2}"])
def test_a_reference_that_is_no_number_cannot_be_graded(reference):
    assert grade("<answer>2</answer>", reference) is None
    assert grade("2", reference, require_tags=False) is None


def test_boxes():
    assert last_boxed("none") is None
    assert last_boxed(r"\boxed{a} \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert last_boxed(r"\fbox{3}") == "3"
    assert last_boxed(r"\boxed{a} \boxed{b{c}") == ""


def test_last_number():
    assert last_number("from 3 to 20 - 2") == 2
    assert last_number("no digits") is None
    assert last_number("about 1/0") is None


numbers = st.decimals(min_value=-(10**9), max_value=10**9, allow_nan=False, places=4)


@settings(max_examples=200, deadline=None)
@given(numbers, st.sampled_from(["{}", "{} clips", "${}", "**{}**", r"\boxed{{{}}}", "The answer is {}.", "{}%"]))
def test_every_decorated_number_reads_as_itself(number: Decimal, form: str):
    assert parse_number(form.format(f"{number:f}")) == Fraction(number)
    assert parse_number(form.format(f"{number:,f}")) == Fraction(number)


@settings(max_examples=200, deadline=None)
@given(numbers, numbers)
def test_two_numbers_are_equal_only_when_they_are(a: Decimal, b: Decimal):
    assert grade(f"<answer>{a:f}</answer>", f"{b:f}") is (a == b)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=list("0123456789.,/-+$%= \\{}^*eE<>answer#√")))
def test_any_text_is_graded_and_tag_free_grading_is_no_stricter(text: str):
    for completion in (text, f"<answer>{text}</answer>"):
        for reference in ("1", "0", "12"):
            strict, free = grade(completion, reference), grade(completion, reference, require_tags=False)
            assert strict is False or free is True


HOSTILE = [
    "1" * 100_000,
    "1," * 50_000,
    "1,111" * 20_000,
    "1/" * 50_000,
    "1 " * 50_000,
    "1" + " " * 100_000,
    "a" + " " * 100_000,
    "1e" * 50_000,
    "=1" * 50_000,
    r"\frac" * 20_000,
    r"\frac{" * 20_000,
    r"\frac" + " " * 50_000 + "{" + " " * 50_000,
    r"\boxed{" * 20_000,
    "<answer>" * 20_000,
    "<think>" * 20_000,
    "^{ " * 30_000,
    "$" * 100_000,
    "#" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:8]!r}x{len(text)}")
def test_hostile_answers_take_linear_time(text):
    start = time.perf_counter()
    grade(f"<answer>{text}</answer>", "1")
    tag_free(text)
    assert time.perf_counter() - start < 5.0  # measured: below 0.5 s; a quadratic pattern takes minutes

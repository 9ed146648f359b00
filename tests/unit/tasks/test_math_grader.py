r"""The math grader: a table of graded answers, and a worker that hostile ones can neither hang nor fill."""

from __future__ import annotations

import time

import pytest

from qerl.tasks.math_grader import MAX_ANSWER_CHARACTERS, clean, final_answer, grade_math, quick_verdict

RIGHT = True
WRONG = False

# What stands between the answer tags, the reference, and the verdict.
GRADED = [
    # numbers, decided exactly
    ("72", "72", RIGHT),
    ("73", "72", WRONG),
    ("025", "25", RIGHT),  # AIME
    ("25", "025", RIGHT),
    ("27", "27.0", RIGHT),  # AMC
    ("18.00", "18", RIGHT),
    ("18.", "18", RIGHT),
    (".5", "0.5", RIGHT),
    ("1/2", "0.5", RIGHT),
    ("0.5", "1/2", RIGHT),
    (r"\frac{1}{2}", "0.5", RIGHT),
    (r"\frac12", r"\dfrac{1}{2}", RIGHT),
    (r"-\frac{1}{2}", "-0.5", RIGHT),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", RIGHT),
    (r"3\frac{1}{2}", "3.5", RIGHT),
    (r"\frac{2}{4}", r"\frac{1}{2}", RIGHT),
    ("$1,000", "1000", RIGHT),
    (r"\$1,000", "1000", RIGHT),
    ("1000", "1{,}000", RIGHT),
    ("11,111,111,100", "11111111100", RIGHT),
    (r"10,\!080", "10080", RIGHT),
    ("1,0000", "10000", WRONG),
    ("\u22125", "-5", RIGHT),
    ("5", "-5", WRONG),
    # near is not equal
    ("3.14", "3.1416", WRONG),
    ("3.1416", "3.14", WRONG),
    ("3.14", r"\pi", WRONG),
    ("3.14159265358979", r"\pi", WRONG),
    ("0.333", r"\frac{1}{3}", WRONG),
    ("0.333333333333", r"\frac{1}{3}", WRONG),
    ("1.41421356", r"\sqrt{2}", WRONG),
    ("1.570796", r"\frac{\pi}{2}", WRONG),
    ("0.70710678", r"\frac{\sqrt{2}}{2}", WRONG),
    ("9007199254740993", "9007199254740992", WRONG),  # equal as floats
    ("0.1", "0.10000000000000001", WRONG),
    ("(0.333333, 2)", r"(\frac{1}{3}, 2)", WRONG),
    # unless the reference is rounded itself
    ("3.14159", r"\approx 3.14", RIGHT),
    ("3.14", r"\approx 3.14", RIGHT),
    (r"\approx 3.14", "3.14", RIGHT),
    ("3.15", r"\approx 3.14", WRONG),
    # markup, words around, units
    ("**73**", "73", RIGHT),
    ("`73`", "73", RIGHT),
    ("$73$", "73", RIGHT),
    (r"\(73\)", "73", RIGHT),
    (r"\[ \frac{1}{2} \]", r"\frac{1}{2}", RIGHT),
    ("The answer is 73.", "73", RIGHT),
    ("Answer: 73", "73", RIGHT),
    (r"\boxed{72 clips}", "72", RIGHT),
    (r"\boxed{72 \text{ clips}}", "72", RIGHT),
    (r"The answer is \boxed{\frac{3}{4}}.", "0.75", RIGHT),
    (r"\boxed{\boxed{7}}", "7", RIGHT),
    (r"$\boxed{7}$ or $\boxed{8}$", "8", RIGHT),  # the last box counts
    (r"$\boxed{7}$ or $\boxed{8}$", "7", WRONG),
    (r"\boxed{72", "72", WRONG),  # never closed: cut off
    (r"\boxed{7} \boxed{72", "7", WRONG),
    (r"\boxed{}", "0", WRONG),
    ("", "0", WRONG),
    (r"5 \text{ cm}", "5", RIGHT),
    (r"5\text{ cm}^2", "5", RIGHT),
    ("5 cm", "5", RIGHT),
    ("60 km/h", "60", RIGHT),
    ("864 \\mbox{ inches}^2", "864", RIGHT),
    (r"90^\circ", "90", RIGHT),
    ("90\u00b0", "90", RIGHT),
    (r"90^{\circ}", r"90^\circ", RIGHT),
    (r"30 \text{ degrees}", "30", RIGHT),
    ("5x", "5", WRONG),
    ("5 pi", "5", WRONG),
    ("5 or 6", "5", WRONG),
    # expressions
    (r"2\sqrt{3}", r"\sqrt{12}", RIGHT),
    (r"\sqrt{13}", r"\sqrt{12}", WRONG),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", RIGHT),
    ("2^{10}", "1024", RIGHT),
    ("2^{10}", "1023", WRONG),
    (r"\frac{\pi}{2}", r"\pi/2", RIGHT),
    ("π/2", r"\frac{\pi}{2}", RIGHT),
    ("3·4", "12", RIGHT),
    (r"3 \times 10^5", "300000", RIGHT),
    ("5!", "120", RIGHT),
    (r"\binom{5}{2}", "10", RIGHT),
    ("x^2+1", "1+x^2", RIGHT),
    ("x^2+1", "x^2-1", WRONG),
    ("(x+1)(x-1)", "x^2-1", RIGHT),
    ("x(x+2)", "x^2+2x", RIGHT),
    ("a^2", "b^2", WRONG),
    ("2k+2", "2(k+1)", RIGHT),
    (r"\cos\frac{\pi}{3}", "0.5", RIGHT),
    ("6+9i", "9i+6", RIGHT),
    ("6-9i", "6+9i", WRONG),
    (r"\frac{1}{0}", "1", WRONG),
    (r"\frac{x+2}{7}", r"\frac17(x+2)", RIGHT),
    (r"x^3 + 3x - 6", "x^3+3x-6", RIGHT),
    ("-x+2", "2-x", RIGHT),
    (r"\sqrt[3]{8}", "2", RIGHT),
    (r"\log_2 8", "3", RIGHT),
    ("not a formula {{", "2", WRONG),
    # equations
    ("x=5", "5", RIGHT),
    ("5", "x=5", RIGHT),
    ("x=5", "x=6", WRONG),
    ("y = 2x + 3", "y=3+2x", RIGHT),
    ("y = 2x + 3", "y=3+3x", WRONG),
    # tuples have an order
    ("(1,2)", "(1, 2)", RIGHT),
    (r"\left(1, 2\right)", "(1,2)", RIGHT),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", RIGHT),
    ("(2,1)", "(1,2)", WRONG),
    ("(1,2,3)", "(1,2)", WRONG),
    ("(0.5, 2)", r"\left(\frac{1}{2}, 2\right)", RIGHT),
    ("1", "(1,2)", WRONG),
    ("(1,2)", "1", WRONG),
    # sets and lists have none
    (r"\{1,2,3\}", r"\{3,2,1\}", RIGHT),
    (r"\{1,2\}", r"\{1,2,3\}", WRONG),
    ("3, 1, 2", "1,2,3", RIGHT),
    ("1,2", r"\{2,1\}", RIGHT),
    ("1 and 2", "1,2", RIGHT),
    ("1,3", "1,2", WRONG),
    ("1", "1,2", WRONG),
    (r"\{1,2\}", "(1,2)", WRONG),
    ("(1,2)", r"\{1,2\}", WRONG),
    (r"\pm 2", "-2, 2", RIGHT),
    ("x = 2 \\text{ or } x = -2", "-2,2", RIGHT),
    # intervals have ends
    ("[1,2)", r"\left[1,2\right)", RIGHT),
    ("[1,2]", "[1,2)", WRONG),
    ("(1,2]", "[1,2)", WRONG),
    ("[2,1)", "[1,2)", WRONG),
    (r"(-\infty, 2]", r"(-\infty,2]", RIGHT),
    ("(-∞, 2]", r"(-\infty,2]", RIGHT),
    (r"(-\infty, 2)", r"(-\infty,2]", WRONG),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)", RIGHT),
    (r"(1,2)\cup(3,5)", r"(3,4)\cup(1,2)", WRONG),
    (r"x \in [1,2)", "[1,2)", RIGHT),
    ("5", r"[\frac{\pi^2}{8}, \frac{5\pi^2}{4}]", WRONG),
    # matrices
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", RIGHT),
    (r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", WRONG),
    (r"\begin{pmatrix}\frac12\\2\end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}", RIGHT),
    (r"\begin{pmatrix}1 & 0\\0 & 1\end{pmatrix}", r"\begin{pmatrix} 1&0 \\ 0&1 \end{pmatrix}", RIGHT),
    (r"\begin{pmatrix}1 & 0\end{pmatrix}", r"\begin{pmatrix} 1 \\ 0 \end{pmatrix}", WRONG),
    # number bases
    ("2516_8", "2516_8", RIGHT),
    ("2516_{8}", "2516_8", RIGHT),
    ("2516_9", "2516_8", WRONG),
    ("2517_8", "2516_8", WRONG),
    # words and choices
    ("Evelyn", r"\text{Evelyn}", RIGHT),
    (r"\text{evelyn}", "Evelyn", RIGHT),
    ("Evelyn.", r"\text{Evelyn}", RIGHT),
    ("Eva", r"\text{Evelyn}", WRONG),
    ("nylevE", r"\text{Evelyn}", WRONG),  # the same product of letters
    ("even", r"\text{odd}", WRONG),
    ("Yes", r"\text{yes}", RIGHT),
    (r"\text{(C)}", "C", RIGHT),
    ("(C)", r"\textbf{(C)}", RIGHT),
    ("D", r"\text{(C)}", WRONG),
]


@pytest.mark.parametrize(("answer", "reference", "verdict"), GRADED)
def test_graded_answers(answer, reference, verdict):
    assert grade_math([f"<think>so</think><answer>{answer}</answer>"], [reference]) == [verdict]


def test_the_table_is_large():
    assert len(GRADED) >= 150
    assert sum(verdict is WRONG for *_, verdict in GRADED) >= 50


@pytest.mark.parametrize(
    ("answer", "reference", "ignored", "as_fraction"),
    [
        (r"50\%", "50", RIGHT, WRONG),
        ("50%", "0.5", WRONG, RIGHT),
        ("50 %", r"50\%", RIGHT, RIGHT),
        (r"12.5\%", "0.125", WRONG, RIGHT),
        ("0.5", "50%", WRONG, RIGHT),
        ("50", r"50\%", RIGHT, WRONG),
        (r"(10\%, 20\%)", "(0.1, 0.2)", WRONG, RIGHT),
    ],
)
def test_percent_signs_go_by_the_policy(answer, reference, ignored, as_fraction):
    text = f"<answer>{answer}</answer>"
    assert grade_math([text], [reference], percent="ignore") == [ignored]
    assert grade_math([text], [reference], percent="fraction") == [as_fraction]


@pytest.mark.parametrize(
    ("text", "tagged", "free"),
    [
        ("<answer>7</answer> no, <answer>72</answer>", "72", "72"),
        (r"<answer>\boxed{72}</answer> \boxed{7}", "72", "72"),
        (r"so \boxed{\frac{1}{2}} and done", None, r"\frac{1}{2}"),
        (r"so \boxed{1} and \boxed{2", None, None),
        (r"<answer>\boxed{2</answer>", None, None),
        ("steps\n#### 72\nbye", None, "72"),
        (r"The answer is $\sqrt{2}$. I hope this helps.", None, r"$\sqrt{2}$"),
        ("**Final Answer:** 3.5 km\nThanks", None, "3.5 km"),
        ("first 3, then 1,000.", None, "1,000."),
        ("no idea", None, None),
        ("", None, None),
        ("<answer></answer>", None, None),
    ],
)
def test_the_final_answer_alone_counts(text, tagged, free):
    assert final_answer(text) == tagged
    assert final_answer(text, require_tags=False) == free


def test_tag_free_grading():
    texts = [r"Hence \boxed{\sqrt{12}}", "The answer is 1/2.", "It is 72", "<answer>3</answer>"]
    references = [r"2\sqrt{3}", "0.5", "72", "3"]
    assert grade_math(texts, references) == [False, False, False, True]
    assert grade_math(texts, references, require_tags=False) == [True] * 4


def test_an_answer_far_too_long_is_wrong_at_once():
    text = f"<answer>{'(' * (MAX_ANSWER_CHARACTERS + 1)}</answer>"
    assert grade_math([text], ["1"]) == [False]


def test_a_reference_that_is_no_mathematics_cannot_be_graded():
    assert grade_math([r"<answer>\sqrt{2}</answer>"], [r"\frac{\frac{"]) == [None]


@pytest.mark.parametrize(
    "piece", ["\\frac", "{", "1,", "\\text{", "$", "(", " ", "\\,", "**", "answer is ", "answer:  "]
)
def test_cleaning_takes_linear_time(piece):
    text = piece * (100_000 // len(piece))
    start = time.perf_counter()
    final_answer(text, require_tags=False)
    assert len(clean(text[:MAX_ANSWER_CHARACTERS], "fraction")) <= MAX_ANSWER_CHARACTERS
    quick_verdict(text[:MAX_ANSWER_CHARACTERS], "1")
    assert time.perf_counter() - start < 2.0

"""Reward functions: what is passed to them, what may go wrong in them, and what then counts."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import signal
import sys
import threading
import time

import math_verify
import pytest

from qerl.config import RewardConfig, TaskConfig
from qerl.rl.advantage import overlong_punishment
from qerl.tasks import load_task
from qerl.tasks.rewards import (
    MAX_FAILED_BATCHES,
    RewardRunner,
    RewardScores,
    RewardSpec,
    exact_reward,
    format_reward,
    length_reward,
    load_reward,
    math_reward,
    numeric_reward,
    overlong_reward,
    reward_specs,
    tag_count_reward,
)

PROMPT = [{"role": "user", "content": "1+1=?"}]


def runner(*functions, weights=None, columns=("answer",), timeout_s=10.0) -> RewardRunner:
    weights = weights or [1.0] * len(functions)
    specs = [RewardSpec(f.__name__, f, weight) for f, weight in zip(functions, weights, strict=True)]
    return RewardRunner(specs, columns=columns, max_steps=10, timeout_s=timeout_s)


def score(rewards: RewardRunner, texts: list[str], answers: list[str] | None = None, step: int = 0) -> RewardScores:
    answers = answers or ["2"] * len(texts)
    return rewards.score(
        prompts=[PROMPT] * len(texts),
        texts=texts,
        completion_ids=[list(text.encode()) for text in texts],
        columns=[{"answer": answer} for answer in answers],
        step=step,
    )


def constant(value):
    def reward(completions, **kwargs):
        return [value] * len(completions)

    return reward


def same(values, expected) -> bool:
    """Equality in which NaN equals NaN."""
    return len(values) == len(expected) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, expected, strict=True)
    )


# ---------------------------------------------------------------- what a function is given


def test_arguments_are_those_of_trl():
    seen = {}

    def reward(prompts, completions, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    score(runner(reward), ["ab", ""], ["2", "3"], step=4)
    assert seen["prompts"] == [PROMPT, PROMPT]
    assert seen["completions"] == [[{"role": "assistant", "content": "ab"}], [{"role": "assistant", "content": ""}]]
    assert seen["completion_ids"] == [[97, 98], []]
    assert seen["answer"] == ["2", "3"]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (4, 10)
    assert set(seen) == {"prompts", "completions", "completion_ids", "answer", "trainer_state"}


def test_a_trl_reward_function_runs_unchanged():
    think_format_reward = pytest.importorskip("trl.rewards").think_format_reward
    scores = score(runner(think_format_reward), ["<think>a</think>b", "b"])
    assert scores.totals == [1.0, 0.0]


def test_a_function_without_kwargs_is_given_what_it_names():
    def reward(answer, completions):
        return [float(len(c[0]["content"]) + int(a)) for a, c in zip(answer, completions, strict=True)]

    assert score(runner(reward), ["abc"]).totals == [5.0]


def test_a_missing_argument_is_found_before_the_run():
    def reward(completions, level):
        raise AssertionError("never called")

    with pytest.raises(ValueError, match=r"reward reward needs the argument 'level'.*there are answer, completion_ids"):
        runner(reward)
    assert runner(reward, columns=("level",))


def test_arguments_with_a_default_may_be_missing():
    def reward(completions, level=3, *args, log_metric=None, **kwargs):
        return [float(level)] * len(completions)

    assert score(runner(reward), ["a"]).totals == [3.0]


def test_positional_only_arguments_are_refused():
    def positional(completions, /):
        return []

    with pytest.raises(ValueError, match="by position only"):
        runner(positional)


def test_what_only_trls_trainer_has_is_refused_unless_it_has_a_default():
    def needs(completions, log_metric):
        raise AssertionError("never called")

    def takes(completions, log_extra=None, **kwargs):
        return [float(log_extra is None)]

    with pytest.raises(ValueError, match="needs 'log_metric', which only TRL's trainer has: give it the default None"):
        runner(needs)
    assert score(runner(takes), ["a"]).totals == [1.0]


def test_constants_come_from_the_config(reward_file):
    config = RewardConfig(
        functions=["qerl.tasks.rewards:overlong_reward", "qerl.tasks.rewards:regex_reward"],
        arguments={"overlong_reward": {"max_length": 10, "buffer": 4}, "regex_reward": {"pattern": "^a.c$"}},
    )
    rewards = RewardRunner(reward_specs(config, default=[]), columns=["answer"], max_steps=1)
    assert score(rewards, ["a\nc", "a" * 8, "a" * 12]).parts == {
        "overlong_reward": [0.0, -0.5, -1.0],
        "regex_reward": [1.0, 0.0, 0.0],
    }
    config.arguments = {"regex": {}}
    with pytest.raises(ValueError, match=r"rewards\.arguments: no reward function is called 'regex'; there are"):
        reward_specs(config, default=[])
    config.arguments = {}
    with pytest.raises(ValueError, match=r"needs the argument 'max_length'.* A constant goes into rewards\.arguments"):
        RewardRunner(reward_specs(config, default=[]), columns=["answer"], max_steps=1)


def test_an_argument_that_a_built_in_function_has_not_is_refused():
    """Its **kwargs would swallow it, and the answer's tags would be asked for without a word."""
    config = RewardConfig(
        functions=["qerl.tasks.rewards:numeric_reward"], arguments={"numeric_reward": {"require_tag": False}}
    )
    with pytest.raises(ValueError, match=r"numeric_reward has no argument 'require_tag'; did you mean require_tags\?"):
        reward_specs(config, default=[])
    config.arguments = {"numeric_reward": {"loud": True}}
    with pytest.raises(ValueError, match=r"no argument 'loud'; it has completions, answer, require_tags"):
        reward_specs(config, default=[])
    config.arguments = {"numeric_reward": {"require_tags": False}}
    assert reward_specs(config, default=[])[0].arguments == {"require_tags": False}


def test_a_users_argument_that_nothing_takes_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def close(completions, tolerance=0.1):\n    return [0.0] * len(completions)\n")
    config = RewardConfig(functions=[f"{tmp_path / 'mine.py'}:close"], arguments={"close": {"tolerence": 5}})
    with pytest.raises(ValueError, match=r"close has no argument 'tolerence'; did you mean tolerance\?"):
        reward_specs(config, default=[])


def test_a_users_argument_that_looks_misspelt_is_told(tmp_path, caplog):
    """What **kwargs take may be meant; `tolerance` stays at its default without a word otherwise."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def close(completions, tolerance=0.1, strict=False, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    config = RewardConfig(functions=[f"{file}:close"], arguments={"close": {"tolerence": 0.2, "scale": 3, "strict": 1}})
    with caplog.at_level("WARNING"):
        reward_specs(config, default=[])
    assert [r.getMessage() for r in caplog.records] == [
        "rewards.arguments: 'tolerence' of close goes into its **kwargs; did you mean tolerance, which it names?"
    ]


def test_a_function_that_changes_its_arguments_changes_no_training_data():
    def reward(completions, completion_ids, **kwargs):
        completion_ids[0].clear()
        return [0.0] * len(completions)

    ids = [[1, 2, 3]]
    runner(reward).score(prompts=[PROMPT], texts=["a"], completion_ids=ids, columns=[{"answer": "2"}], step=0)
    assert ids == [[1, 2, 3]]


# ---------------------------------------------------------------- what it returns


def test_the_total_is_the_weighted_sum():
    def length(completions, **kwargs):
        return [len(c[0]["content"]) for c in completions]

    def first(completions, **kwargs):
        return [1.0, 0.0]

    scores = score(runner(length, first, weights=[0.5, -2.0]), ["abcd", "ab"])
    assert scores.totals == [0.0, 1.0]
    assert scores.parts == {"length": [4.0, 2.0], "first": [1.0, 0.0]}
    assert scores.failed == {"length": 0, "first": 0}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "1", [1.0], 1j, 10**400])
def test_what_is_no_finite_number_is_no_value_and_never_zero(value):
    def reward(completions, **kwargs):
        return [value, 1.0]

    scores = score(runner(reward), ["a", "b"])
    assert same(scores.totals, [math.nan, 1.0])
    assert same(scores.parts["reward"], [math.nan, 1.0])
    assert scores.failed == {"reward": 1}


def test_another_function_still_pays_for_a_completion_without_a_value():
    def first(completions, **kwargs):
        return [None, 1.0, None]

    def second(completions, **kwargs):
        return [0.25, 0.5, None]

    scores = score(runner(first, second, weights=[2.0, 1.0]), ["a", "b", "c"])
    assert same(scores.totals, [0.25, 2.5, math.nan])
    assert scores.failed == {"first": 2, "second": 1}


def test_a_completion_that_a_function_could_not_judge_is_not_paid_the_rest():
    """Among others that have both terms, half of the sum would say that it is wrong."""

    def correct(completions, **kwargs):
        return [1.0, math.nan, 0.0]

    def well_formed(completions, **kwargs):
        return [0.2, 0.2, 0.2]

    scores = score(runner(correct, well_formed), ["a", "b", "c"])
    assert same(scores.totals, [1.2, math.nan, 0.2])
    assert same(scores.parts["well_formed"], [0.2, 0.2, 0.2])
    assert scores.failed == {"correct": 1, "well_formed": 0}


def test_numpy_and_torch_values_are_numbers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    def array(completions, **kwargs):
        return numpy.array([1.5, numpy.nan])

    def tensor(completions, **kwargs):
        return torch.tensor([True, False])

    scores = score(runner(array, tensor), ["a", "b"])
    assert same(scores.totals, [2.5, math.nan])
    assert scores.parts["tensor"] == [1.0, 0.0]
    assert scores.failed == {"array": 1, "tensor": 0}


def test_an_empty_batch_has_no_rewards():
    assert score(runner(constant(1.0)), []).totals == []


# ---------------------------------------------------------------- failures


def raises(completions, **kwargs):
    raise KeyError("judge")


def too_short(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


def not_a_list(completions, **kwargs):
    return 1.0


def returns_nothing(completions, **kwargs):
    pass


def all_infinite(completions, **kwargs):
    return [math.inf] * len(completions)


@pytest.mark.parametrize("function", [raises, too_short, not_a_list, returns_nothing, all_infinite])
def test_a_function_that_fails_is_counted_shown_and_stops_the_run_when_it_persists(function, caplog):
    rewards = runner(function, constant(0.2))
    for batch in range(MAX_FAILED_BATCHES - 1):
        with caplog.at_level(logging.WARNING, logger="qerl"):
            scores = score(rewards, ["first text", "b"])
        assert scores.totals == [0.2, 0.2]
        assert scores.failed == {function.__name__: 2, "reward": 0}
        assert len(caplog.records) == batch + 1
        assert function.__name__ in caplog.text
        assert "first text" in caplog.text
    with pytest.raises(RuntimeError, match=rf"reward {function.__name__} failed .*first text.* 3 batches in a row"):
        score(rewards, ["first text", "b"])


def test_a_good_batch_forgives():
    outcomes = iter([KeyError, KeyError, None, KeyError, KeyError, None])

    def flaky(completions, **kwargs):
        if error := next(outcomes):
            raise error
        return [1.0] * len(completions)

    rewards = runner(flaky, constant(0.0))
    assert [score(rewards, ["a"]).totals[0] for _ in range(6)] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_some_bad_values_are_shown_and_go_on_for_ever(caplog):
    def reward(completions, **kwargs):
        return [math.nan, 1.0]

    rewards = runner(reward)
    for _ in range(2 * MAX_FAILED_BATCHES):
        score(rewards, ["bad one", "b"])
    assert "1 of 2 completions" in caplog.text
    assert "bad one" in caplog.text


def test_none_is_no_failure_of_its_function(caplog):
    def ones(completions, **kwargs):
        return [1.0] * len(completions)

    rewards = runner(constant(None), ones)
    for _ in range(2 * MAX_FAILED_BATCHES):
        assert score(rewards, ["a"]).totals == [1.0]
    assert not caplog.records


@pytest.mark.parametrize("returned", [None, 1.0, "1"])
def test_what_is_no_list_is_told(returned, caplog):
    def forgetful(completions):
        return returned

    rewards = runner(forgetful, constant(0.2))
    with caplog.at_level("WARNING"):
        score(rewards, ["a"])
    assert f"it returned {returned!r}: return a list, one number a completion" in caplog.text


def test_whether_anything_was_ever_paid():
    rewards = runner(constant(None))
    score(rewards, ["a"])
    assert not rewards.has_paid
    rewards = runner(constant(0.0))
    score(rewards, ["a"])
    assert rewards.has_paid


def test_batches_without_any_reward_stop_the_run():
    rewards = runner(constant(None))
    for _ in range(MAX_FAILED_BATCHES - 1):
        assert same(score(rewards, ["a"]).totals, [math.nan])
    with pytest.raises(RuntimeError, match="no completion had a reward from any of reward in 3 batches"):
        score(rewards, ["a"])


def test_an_interrupt_is_not_swallowed():
    def reward(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(runner(reward), ["a"])


def exits(completions, **kwargs):
    sys.exit("no judge")


async def exits_later(completions, **kwargs):
    await asyncio.sleep(0)
    sys.exit("no judge")


@pytest.mark.parametrize("function", [exits, exits_later])
def test_an_exit_is_counted_like_any_failure(function, caplog):
    rewards = runner(function, constant(0.5))
    for _ in range(2):  # the event loop lives on
        scores = score(rewards, ["a", "b"])
        assert scores.totals == [0.5, 0.5]
        assert scores.failed == {function.__name__: 2, "reward": 0}
    assert "no judge" in caplog.text
    with pytest.raises(RuntimeError, match=f"reward {function.__name__} failed .* 3 batches in a row"):
        score(rewards, ["a"])


def test_names_must_differ_and_there_must_be_one():
    with pytest.raises(ValueError, match="two reward functions are called 'reward'"):
        runner(constant(1.0), constant(2.0))
    with pytest.raises(ValueError, match="no reward function"):
        runner()
    named = constant(1.0)
    named.__name__ = "a/b"
    with pytest.raises(ValueError, match="called 'a/b': rename it"):
        runner(named)


# ---------------------------------------------------------------- asynchronous functions, and time


async def sleeps(completions, **kwargs):
    await asyncio.sleep(0.3)
    return [1.0] * len(completions)


def test_asynchronous_functions_of_a_batch_run_at_the_same_time():
    async def sleeps_too(completions, **kwargs):
        return await sleeps(completions)

    def waits(completions, **kwargs):
        time.sleep(0.3)
        return [0.5] * len(completions)

    rewards = runner(sleeps, waits, sleeps_too)
    start = time.monotonic()
    scores = score(rewards, ["a", "b"])
    assert time.monotonic() - start < 0.8
    assert scores.totals == [2.5, 2.5]
    assert list(scores.parts) == ["sleeps", "waits", "sleeps_too"]


def test_the_event_loop_outlives_a_batch():
    loops = []

    async def remembers(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    rewards = runner(remembers)
    for _ in range(2):
        score(rewards, ["a"])
    assert loops[0] is loops[1]


async def raises_later(completions, **kwargs):
    raise KeyError("judge")


async def hangs_later(completions, **kwargs):
    await asyncio.sleep(60)


async def blocks_the_loop(completions, **kwargs):
    time.sleep(1.5)


def hangs(completions, **kwargs):
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises_later, "KeyError: 'judge'"),
        (hangs_later, "it took longer than rewards.timeout_s = 0.2 s"),
        (blocks_the_loop, "it took longer than rewards.timeout_s = 0.2 s"),
        (hangs, "it took longer than rewards.timeout_s = 0.2 s"),
    ],
)
def test_what_hangs_or_raises_costs_its_own_values_alone(function, message, caplog):
    rewards = runner(function, constant(0.5), timeout_s=0.2)
    start = time.monotonic()
    scores = score(rewards, ["a", "b"])
    assert time.monotonic() - start < 3.0
    assert scores.totals == [0.5, 0.5]
    assert scores.failed == {function.__name__: 2, "reward": 0}
    assert message in caplog.text


def test_a_loop_that_was_blocked_is_replaced():
    calls = []

    async def blocks_once(completions, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            time.sleep(3)
        return [1.0] * len(completions)

    rewards = runner(blocks_once, constant(0.0), timeout_s=0.2)
    assert [score(rewards, ["a"]).totals for _ in range(2)] == [[0.0], [1.0]]


def test_the_functions_own_time_out_is_told_as_such(caplog):
    def asks(completions, **kwargs):
        raise TimeoutError("the judge is away")

    async def asks_later(completions, **kwargs):
        raise TimeoutError("the other judge is away")

    score(runner(asks, asks_later, constant(0.0)), ["a"])
    assert "the judge is away" in caplog.text
    assert "the other judge is away" in caplog.text


def test_an_object_may_be_asynchronous():
    class Judge:
        async def __call__(self, completions, **kwargs):
            return [2.0] * len(completions)

    rewards = RewardRunner([RewardSpec("judge", Judge())], columns=["answer"], max_steps=1)
    assert score(rewards, ["a"]).totals == [2.0]


def test_a_function_that_needs_the_main_thread_gets_it(caplog):
    threads = []

    def alarms(completions, **kwargs):
        threads.append(threading.current_thread())
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return [1.0] * len(completions)

    rewards = runner(alarms)
    assert [score(rewards, ["a"]).totals for _ in range(2)] == [[1.0], [1.0]]
    assert threads[1:] == [threading.main_thread()] * 2
    assert caplog.text.count("reward alarms needs the main thread") == 1


# ---------------------------------------------------------------- functions as notebooks have them


def xml_answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    print(f"Question: {prompts[0][-1]['content']}\nAnswer: {answer[0]}\nResponse: {responses[0]}")
    return [2.0 if xml_answer(r) == a else 0.0 for r, a in zip(responses, answer, strict=True)]


def soft_format_reward_func(completions, **kwargs) -> list[float]:
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 if re.match(pattern, c[0]["content"], re.DOTALL) else 0.0 for c in completions]


def math_accuracy_reward(completions: list[list[dict[str, str]]], answer: list[str], **kwargs) -> list[float | None]:
    rewards: list[float | None] = []
    for completion, solution in zip(completions, answer, strict=True):
        gold = math_verify.parse(f"${solution}$")
        said = math_verify.parse(completion[0]["content"])
        rewards.append(float(math_verify.verify(gold, said)) if gold else None)
    return rewards


def test_reward_functions_of_notebooks_run_unchanged(capsys):
    texts = ["<reasoning>1+1</reasoning>\n<answer>2</answer>", "<answer>3</answer>"]
    scores = score(runner(correctness_reward_func, soft_format_reward_func), texts)
    assert scores.totals == [2.5, 0.0]
    assert "Question: 1+1=?" in capsys.readouterr().out
    scores = score(runner(math_accuracy_reward), [r"so $\\frac{4}{2}$", "so $3$"])  # its time-outs are signals
    assert scores.totals == [1.0, 0.0]


def test_the_reward_functions_that_trl_ships_run_unchanged():
    trl_rewards = pytest.importorskip("trl.rewards")
    texts = [r"<think>1+1</think> so $\boxed{2}$", r"so $\boxed{3}$"]
    scores = score(runner(trl_rewards.think_format_reward), texts)
    assert scores.totals == [1.0, 0.0]
    accuracy = RewardRunner(
        [RewardSpec("accuracy", trl_rewards.accuracy_reward, 1.0)], columns=("solution",), max_steps=10
    )
    scores = accuracy.score(
        prompts=[PROMPT] * 2, texts=texts, completion_ids=[[1], [1]], columns=[{"solution": "$2$"}] * 2, step=0
    )
    assert scores.totals == [1.0, 0.0]
    overlong = trl_rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
    repeated = trl_rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    objects = [RewardSpec("overlong", overlong, 1.0), RewardSpec("repeated", repeated, 1.0)]
    parts = RewardRunner(objects, columns=(), max_steps=10).score(
        prompts=[PROMPT] * 2, texts=["a", "b"], completion_ids=[[7] * 15, [1, 2, 3]], columns=[{}, {}], step=0
    ).parts  # fmt: skip
    assert parts["overlong"] == [-0.5, 0.0] and parts["repeated"][0] < -0.9 and parts["repeated"][1] == 0


# ---------------------------------------------------------------- loading


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "CALLS = []\n"
        "@dataclass\n"
        "class Rule:\n"
        "    value: float = 3.0\n"
        "def longest(completions, **kwargs):\n"
        "    CALLS.append(1)\n"
        "    return [Rule().value for _ in completions]\n"
        "def calls(completions, **kwargs):\n"
        "    return [float(len(CALLS))] * len(completions)\n"
    )
    return path


def test_functions_of_one_file_share_one_module(reward_file):
    longest, calls = load_reward(f"{reward_file}:longest"), load_reward(f"{reward_file}:calls")
    assert longest([None]) == [3.0]
    assert calls([None]) == [1.0]


def test_a_function_of_a_module():
    assert load_reward("qerl.tasks.rewards:format_reward") is format_reward


@pytest.mark.parametrize("place", ["longest", ":longest", "file.py:", ""])
def test_a_place_needs_both_parts(place):
    with pytest.raises(ValueError, match="not of the form"):
        load_reward(place)


def test_loading_says_what_is_missing(reward_file, tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.py"):
        load_reward(f"{tmp_path}/nowhere.py:f")
    with pytest.raises(ValueError, match=r"has no function 'longes'; it has longest"):
        load_reward(f"{reward_file}:longes")
    with pytest.raises(ValueError, match=r"is a list, not a function"):
        load_reward(f"{reward_file}:CALLS")
    with pytest.raises(ValueError, match=r"No module named 'no_such_module'.*path/to/file\.py:function"):
        load_reward("no_such_module:f")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for _ in range(2):  # a broken module is not remembered as loaded
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            load_reward(f"{tmp_path}/broken.py:f")


def test_configured_functions_replace_the_tasks_own(reward_file):
    config = RewardConfig(functions=[f"{reward_file}:longest", f"{reward_file}:calls"], weights=[1.0, 0.5])
    specs = reward_specs(config, default=[RewardSpec("format", format_reward)])
    assert [(spec.name, spec.weight) for spec in specs] == [("longest", 1.0), ("calls", 0.5)]


def test_weights_alone_reweigh_the_tasks_own():
    default = [RewardSpec("format", format_reward, 0.2), RewardSpec("correctness", numeric_reward, 2.0)]
    assert reward_specs(RewardConfig(), default) == default
    assert [spec.weight for spec in reward_specs(RewardConfig(weights=[0.0, 1.0]), default)] == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"rewards\.weights has 1 numbers.*format, correctness"):
        reward_specs(RewardConfig(weights=[1.0]), default)


# ---------------------------------------------------------------- the built-in ones


def test_a_tasks_own_rewards():
    task = load_task(TaskConfig(), seed=0)
    rewards = RewardRunner.from_config(RewardConfig(), task, max_steps=1)
    example = task.train_example(0)
    texts = [
        example.columns["solution"],
        "<think>I guess</think><answer>-1</answer>",
        f"<answer>{example.columns['answer']}</answer>",
        example.columns["answer"],
        "",
    ]
    n = len(texts)
    scores = rewards.score(
        prompts=[example.prompt] * n, texts=texts, completion_ids=[[]] * n, columns=[example.columns] * n, step=0
    )
    assert scores.totals == pytest.approx([1.2, 0.2, 1.0, 0.0, 0.0])
    assert scores.parts["format"] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert scores.parts["correctness"] == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_a_reference_that_is_no_number_gives_no_value():
    scores = score(runner(numeric_reward), ["<answer>2</answer>"] * 2, ["2", "two"])
    assert same(scores.totals, [1.0, math.nan])
    assert scores.failed == {"numeric_reward": 1}


def test_built_in_correctness():
    texts = [r"<answer>\\frac{1}{2}</answer>", "<answer>0.5</answer>", "<answer> 1/2 </answer>", "<answer>2</answer>"]
    assert numeric_reward(texts, answer=["1/2"] * 4) == [1.0, 1.0, 1.0, 0.0]
    bare = ["So it is 0.5.", "<answer>1/3</answer> or 1/2"]
    assert numeric_reward(bare, answer=["1/2"] * 2) == [0.0, 0.0]
    assert numeric_reward(bare, answer=["1/2"] * 2, require_tags=False) == [1.0, 0.0]
    assert math_reward(texts, answer=["1/2"] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert exact_reward(texts, answer=["1/2"] * 4) == [0.0, 0.0, 1.0, 0.0]
    boxed = [r"\boxed{1/2}"]
    for reward in (numeric_reward, math_reward, exact_reward):
        assert reward(boxed, answer=["1/2"]) == [0.0]
        assert reward(boxed, answer=["1/2"], require_tags=False) == [1.0]


@pytest.mark.parametrize(
    ("arguments", "weights", "require_tags"),
    [
        ({}, [0.2, 1.0], True),
        ({"correctness": {"require_tags": True}}, [0.2, 1.0], True),
        ({"correctness": {"require_tags": False}}, [0.2, 1.0], False),
        ({"correctness": {"require_tags": False}}, [0.2, 0.0], True),  # it is logged, and not paid
    ],
)
def test_a_run_is_graded_as_it_is_paid(arguments, weights, require_tags):
    config = RewardConfig(arguments=arguments, weights=weights)
    rewards = RewardRunner.from_config(config, load_task(TaskConfig(), seed=0), max_steps=1)
    assert rewards.require_tags is require_tags


def test_tags_are_counted_once():
    texts = ["<think>a</think><answer>b</answer>", "<answer>b</answer>", "<think><think></think>", ""]
    assert tag_count_reward(texts) == [1.0, 0.5, 0.25, 0.0]


def test_shorter_is_better():
    assert length_reward([[], [1, 2], [1] * 4, [1] * 9], max_length=4) == [0.0, -0.5, -1.0, -1.0]


def test_overlong_is_the_losss_own_punishment():
    lengths = range(0, 120, 7)
    expected = [-overlong_punishment(n, 100, 20) for n in lengths]
    assert overlong_reward([[0] * n for n in lengths], max_length=100, buffer=20) == pytest.approx(expected)


def test_built_in_rewards_read_plain_text_too():
    assert format_reward(["<think>a</think><answer>2</answer>"]) == [1.0]
    assert numeric_reward(["<answer>2</answer>"], answer=["2"]) == [1.0]

"""How good a policy is on held-out problems: adapters on, noise off.

    problems -> engine -> completions -> graded twice -> scores per problem -> estimates with 95 % intervals
                 sampling.py                  votes.py, statistics.py          files.py, show.py

| file | what it is |
|---|---|
| `sampling.py` | `evaluate`: requests, completions, grades; `Evaluation`, what they say |
| `statistics.py` | pass@k, intervals over problems, paired differences, the sign test |
| `votes.py` | majority@k: the final answer that most completions give |
| `files.py` | results as Parquet, there and back |
| `show.py` | the table, and the progress while it is measured |
| `command.py` | `run`: models loaded, measured, compared, written; what `qerl eval` calls |

The trainer calls `evaluate`. docs/evaluation.md says how to read the numbers.
"""

from qerl.evaluate.sampling import GRADINGS, Attempt, Evaluation, Grading, ProblemResult, evaluate

__all__ = ["GRADINGS", "Attempt", "Evaluation", "Grading", "ProblemResult", "evaluate"]

"""Two ways of decoding the same prompts, compared: speed, accepted length, and the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Answer:
    """One timed answer.

    Attributes:
        token_ids: the answer.
        seconds: wall time of the whole call, prompt included.
        steps: decode steps, each one reading of the target's weights.
    """

    token_ids: tuple[int, ...]
    seconds: float
    steps: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same prompt answered by both arms."""

    category: str
    plain: Answer
    dspark: Answer


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that only one side has; None when equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """All tokens over all seconds."""
    return sum(len(answer.token_ids) for answer in answers) / sum(a.seconds for a in answers)


def accepted_length(answers: Sequence[Answer]) -> float:
    """Tokens a step, the bonus token included; plain decoding has 1."""
    return sum(len(answer.token_ids) for answer in answers) / sum(a.steps for a in answers)


def comparison_table(pairs: Sequence[Pair]) -> Table:
    """One row a category in order of appearance, and one for all prompts."""
    table = Table()
    table.add_column("prompts")
    for title in ("plain tokens/s", "DSpark tokens/s", "speed-up", "accepted length"):
        table.add_column(title, justify="right")
    for category in dict.fromkeys(pair.category for pair in pairs):
        own = [pair for pair in pairs if pair.category == category]
        table.add_row(*_row(category, own))
    table.add_section()
    table.add_row(*_row("all", pairs), style="bold")
    return table


def _row(name: str, pairs: Sequence[Pair]) -> tuple[str, ...]:
    plain = tokens_per_second([pair.plain for pair in pairs])
    dspark_answers = [pair.dspark for pair in pairs]
    dspark = tokens_per_second(dspark_answers)
    length = accepted_length(dspark_answers)
    return name, f"{plain:.1f}", f"{dspark:.1f}", f"{dspark / plain:.2f}x", f"{length:.2f}"

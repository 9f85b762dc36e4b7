"""Closed-loop load: a fixed number of users, each asking again as soon as it is answered."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from dspark_jax.decode.request import Completion, Request
from dspark_jax.engine.engine import Engine
from dspark_jax.engine.figures import as_json


@dataclasses.dataclass(frozen=True)
class Load:
    """What came back.

    Attributes:
        answers: in order of the requests.
        seconds: from the first request to the last answer.
        full_seconds: of those, until the last request had been made: all users were busy.
        full_tokens: committed in that time.
    """

    answers: list[Completion]
    seconds: float
    full_seconds: float
    full_tokens: int


def closed_loop(
    engine: Engine,
    requests: Sequence[Request],
    users: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Load:
    """Keep ``users`` requests in the engine until all have been answered.

    Raises:
        RuntimeError: an answer without a token: nothing may be concluded from it.
    """
    found: dict[int, Completion] = {}
    asking: dict[int, int] = {}
    made = 0
    full_seconds, full_tokens = 0.0, 0
    begin = clock()
    while len(found) < len(requests):
        while len(asking) < users and made < len(requests):
            asking[engine.add(requests[made])] = made
            made += 1
            if made == len(requests):
                full_seconds = clock() - begin
                full_tokens = as_json(engine.figures())["generation_tokens_total"]
        for number, answer in engine.step().items():
            found[asking.pop(number)] = answer
    seconds = clock() - begin
    for index, answer in found.items():
        if not answer.token_ids:
            raise RuntimeError(f"answer {index} is empty and ended by {answer.finish_reason!r}")
    ordered = [found[index] for index in range(len(requests))]
    return Load(ordered, seconds, full_seconds, full_tokens)

"""Answers kept the moment they end: one JSON line each, so that no end of a job costs one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark_jax.decode.request import Completion, Request
from dspark_jax.decode.session import Generator
from train.stopping import Stop, Stopped

Key = tuple[int, ...]
"""Which question of a job an answer belongs to; the job says what the numbers mean."""


class Journal:
    """The answers of a job, in memory and in a file; ``kept`` holds those of earlier attempts.

    A line that a crash cut short is dropped: its answer was never taken for given.

    Raises:
        ValueError: a line that is no answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[Key, Completion] = {}
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                key = tuple(entry.pop("key"))
                self.kept[key] = _completion(entry)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no answer of a job: {error}") from error
        if whole != written:
            path.write_bytes(whole)
        self._file = path.open("ab")

    def add(self, key: Key, completion: Completion) -> None:
        """Keep one answer; it survives the end of the process from here on."""
        self.kept[key] = completion
        entry = {"key": key, **dataclasses.asdict(completion)}
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file: what it kept is stored elsewhere by now."""
        self.close()
        self.path.unlink()


def _completion(entry: dict[str, Any]) -> Completion:
    return Completion(**{name: _tuples(value) for name, value in entry.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def answer_all(
    session: Generator,
    requests: Mapping[Key, Request],
    journal: Journal,
    stop: Stop,
    on_answer: Callable[[Key, Completion], None],
) -> dict[Key, Completion]:
    """Answers to all ``requests``: those the journal keeps, and new ones, kept as they end.

    ``on_answer`` is called with each new one.

    Raises:
        Stopped: a signal came before the last answer.
    """
    asked = [key for key in requests if key not in journal.kept]

    def keep(index: int, done: Completion) -> None:
        journal.add(asked[index], done)
        on_answer(asked[index], done)

    session.generate([requests[key] for key in asked], on_completion=keep, interrupt=stop)
    if any(key not in journal.kept for key in requests):
        raise Stopped(stop.code)
    return {key: journal.kept[key] for key in requests}

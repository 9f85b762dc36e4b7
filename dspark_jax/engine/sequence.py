"""One request inside an engine: its text, its pages, and where it stands."""

from __future__ import annotations

import dataclasses
import enum

from dspark_jax.decode.job import Job
from dspark_jax.decode.request import TokenLogprob
from dspark_jax.engine.page_store import Key, next_key


class Stage(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    DONE = enum.auto()


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request from its arrival to its answer. ``tokens`` and ``steps`` are what the host knows.

    Attributes:
        job: the checked request; its index counts arrivals.
        context: most tokens of prompt and answer together.
        tokens: the answer so far.
        windows, accepted, commits: of every step so far.
        logprobs: one a token, if asked for.
        slot: while prefilling or decoding.
        pages: of its rows, in order.
        prefilled: rows of the text whose prefill has been dispatched or restored.
        in_flight: steps dispatched and not read yet.
        keys: of its full pages of known tokens.
        remembered: how many of ``pages`` the store has been told of.
        preemptions: how often it lost its pages.
        reused_rows: rows that it found in known pages instead of computing them.
        expected: drafts of all its windows that were expected to be accepted, summed survivals;
            None without confidences.
        arrived, joined, first_token: seconds on the engine's clock; None before.
    """

    job: Job
    context: int
    stage: Stage = Stage.WAITING
    tokens: list[int] = dataclasses.field(default_factory=list)
    windows: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    commits: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    in_flight: int = 0
    keys: list[Key] = dataclasses.field(default_factory=list)
    remembered: int = 0
    preemptions: int = 0
    reused_rows: int = 0
    expected: float | None = None
    arrived: float | None = None
    joined: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        params = self.job.params
        self.prompt_rows = len(self.job.prompt_ids)
        self._most = min(self.prompt_rows + params.max_new_tokens, self.context) - 1

    @property
    def arrival(self) -> int:
        """Order of service."""
        return self.job.index

    @property
    def rows(self) -> int:
        """Known rows: all of the text but its last token, the anchor of the next step."""
        return self.prompt_rows + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Tokens that it may still emit, of what the host knows."""
        return self._most - self.rows

    def text(self, begin: int, end: int) -> list[int]:
        """Token ids ``begin..end-1`` of prompt and answer."""
        prompt = self.job.prompt_ids
        if end <= len(prompt):
            return list(prompt[begin:end])
        after = self.tokens[max(begin - len(prompt), 0) : end - len(prompt)]
        return [*prompt[begin:], *after]

    def most_rows(self, steps: int, width: int) -> int:
        """Rows it can own after ``steps`` more steps of windows of ``width`` rows."""
        return min(self.rows + (self.in_flight + steps) * width, self._most)

    def page_keys(self, page_size: int) -> list[Key]:
        """Keys of the full pages of its known rows."""
        for page in range(len(self.keys), self.rows // page_size):
            previous = self.keys[-1] if self.keys else b""
            self.keys.append(
                next_key(previous, self.text(page * page_size, (page + 1) * page_size))
            )
        return self.keys

"""One request inside an engine: where it stands, and its place in the roster."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.decode.job import Job
from dspark_jax.decode.request import TokenLogprob
from dspark_jax.engine.page_store import Key, next_key

if TYPE_CHECKING:
    from dspark_jax.engine.roster import Roster


class Stage(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    DONE = enum.auto()


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request from its arrival to its answer. What grows with every step lies in the roster.

    Attributes:
        job: the checked request; its index counts arrivals.
        context: most tokens of prompt and answer together.
        roster: where it has a slot; None before it first joins and when it has ended.
        slot: which one, kept while it waits for pages that it has lost.
        logprobs: one a token, if asked for.
        prefilled: rows of the text whose prefill has been dispatched or restored.
        keys: of its full pages of known tokens.
        preemptions: how often it lost its pages.
        reused_rows: rows that it found in known pages instead of computing them.
        arrived, joined, first_token: seconds on the engine's clock; None before.
    """

    job: Job
    context: int
    stage: Stage = Stage.WAITING
    roster: Roster | None = None
    slot: int = -1
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    keys: list[Key] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    reused_rows: int = 0
    arrived: float | None = None
    joined: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        params = self.job.params
        self.arrival = self.job.index
        self.prompt_rows = len(self.job.prompt_ids)
        self.most = min(self.prompt_rows + params.max_new_tokens, self.context) - 1

    @property
    def rows(self) -> int:
        """Known rows: all of the text but its last token, the anchor of the next step."""
        return self.prompt_rows - 1 if self.roster is None else int(self.roster.rows[self.slot])

    @property
    def in_flight(self) -> int:
        """Steps dispatched and not read yet."""
        return 0 if self.roster is None else int(self.roster.in_flight[self.slot])

    @property
    def steps(self) -> int:
        """Steps so far."""
        return 0 if self.roster is None else int(self.roster.steps[self.slot])

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return self.text(self.prompt_rows, self.rows + 1)

    @property
    def pages(self) -> list[int]:
        """Pages of its rows, in order."""
        if self.roster is None:
            return []
        return self.roster.table[self.slot, : self.roster.pages[self.slot]].tolist()

    @property
    def expected(self) -> float | None:
        """Drafts of its windows expected to be accepted; None without confidences."""
        found = math.nan if self.roster is None else float(self.roster.expected[self.slot])
        return None if math.isnan(found) else found

    @property
    def records(self) -> list[list[int]]:
        """Windows, accepted drafts and commits of the steps so far."""
        if self.roster is None:
            return [[], [], []]
        return self.roster.records[:, self.slot, : self.steps].tolist()

    def text(self, begin: int, end: int) -> list[int]:
        """Token ids ``begin..end-1`` of prompt and answer."""
        return np.asarray(self._ids(begin, end)).tolist()

    def page_keys(self, page_size: int) -> list[Key]:
        """Keys of the full pages of its known rows."""
        for page in range(len(self.keys), self.rows // page_size):
            previous = self.keys[-1] if self.keys else b""
            ids = self._ids(page * page_size, (page + 1) * page_size)
            self.keys.append(next_key(previous, ids))
        return self.keys

    def _ids(self, begin: int, end: int) -> Many[int] | Any:
        if self.roster is None:
            return self.job.prompt_ids[begin:end]
        return self.roster.texts[self.slot, begin:end]

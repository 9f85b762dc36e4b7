"""Corrects a cost table by the step times that an engine sees while it serves. Host only.

A table may be old, or the machine busy. What decides budgets is how costs compare, so each bucket
of each program (lanes, pieces of prompts) has a factor of its own, and drafting has one. A dispatch
that took longer than predicted raises the factors of what it ran, a little: its evidence is clipped
first, so that a hiccup counts no more than a slow step. What it did not run moves along as far as
it has not been seen itself: all of a program's factors stay together until they are told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from dspark_jax.schedule.cost import CostTables

Program = tuple[int, int]
"""Lanes of a step, and pieces of prompts that it has room for."""

RATE = 0.05
"""Share of a dispatch's evidence that is taken over."""

CLIP = 0.1
"""Most evidence of one dispatch, as the log of measured over predicted time."""

LIMIT = 4.0
"""Factors stay within 1/LIMIT and LIMIT."""

MEMORY = 1000
"""Dispatches over which it fades what a bucket was seen to cost."""

TRUST = 10
"""Dispatches of its own after which a bucket follows the others only by half."""

NOTICEABLE = 0.02
"""Relative change of a factor from which on tables are made anew."""


@dataclasses.dataclass
class _Factors:
    """Of one program, as logs: one a bucket, and the draft's at the end.

    ``seen`` counts dispatches, forgotten slowly; ``shown`` are the factors in use.
    """

    log: np.ndarray
    seen: np.ndarray
    shown: np.ndarray


class CostCorrection:
    """Factors of everything that has been measured, and the tables they make.

    Args:
        costs: tables on the host by program; asked when the first step is measured.
        buckets: row counts that steps of so many lanes are padded to.
        use: takes a program's new tables, whenever a factor has changed noticeably.
    """

    def __init__(
        self,
        costs: Callable[[], Mapping[Program, CostTables]],
        buckets: Callable[[int], tuple[int, ...]],
        use: Callable[[Program, CostTables], None],
    ) -> None:
        self._costs, self._buckets, self._use = costs, buckets, use
        self._of: dict[Program, _Factors] = {}

    def observe(self, program: Program, verify: np.ndarray, draft: float, seconds: float) -> None:
        """Learn from a dispatch that took ``seconds``.

        Args:
            verify: seconds that the table gives its verifications, summed by bucket.
            draft: the same of its drafts.
        """
        predicted = np.append(verify, draft)
        if program not in self._of:
            self._of[program] = _Factors(*np.zeros((3, len(predicted))))
        found = self._of[program]
        parts = np.exp(found.log) * predicted
        share = parts / parts.sum()
        evidence = np.clip(np.log(seconds / parts.sum()), -CLIP, CLIP)
        alike = TRUST / (TRUST + found.seen)
        moves = share + (1 - share) * alike
        # The prediction moves as far as the evidence says, and with it what is not told apart.
        moves = np.where(share > 0, moves / (share @ moves), alike)
        found.log += RATE * evidence * moves
        found.seen = found.seen * (1 - 1 / MEMORY) + share
        # What was dear once, and is not run any more, is not dear for ever.
        common = (found.seen * found.log).sum() / found.seen.sum()
        found.log += alike / MEMORY * (common - found.log)
        found.log = np.clip(found.log, -np.log(LIMIT), np.log(LIMIT))
        if np.abs(found.log - found.shown).max() >= NOTICEABLE:
            found.shown = found.log.copy()
            self._use(program, self._tables(program))

    def factors(self) -> dict[str, float]:
        """Factors in use of what has been seen, by ``lanes x rows + pieces``."""
        return {
            f"{lanes}x{name}+{pieces}": float(np.exp(shown))
            for (lanes, pieces), found in self._of.items()
            for name, shown, seen in zip(
                (*self._buckets(lanes), "draft"), found.shown, found.seen, strict=True
            )
            if seen
        }

    def _tables(self, program: Program) -> CostTables:
        """The program's tables with its factors; still non-decreasing in the rows."""
        plain, buckets = self._costs()[program], self._buckets(program[0])
        factors = np.exp(self._of[program].shown)
        rows = np.arange(plain.verify.shape[1])
        bucket = np.minimum(np.searchsorted(buckets, rows), len(buckets) - 1)
        verify = np.maximum.accumulate(np.asarray(plain.verify) * factors[bucket], axis=1)
        draft = np.asarray(plain.draft) * factors[-1]
        return dataclasses.replace(
            plain, verify=verify.astype(np.float32), draft=draft.astype(np.float32)
        )

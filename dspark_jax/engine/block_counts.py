"""How often blocks of each kind occurred: all that is counted of drafts follows from it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int


class BlockCounts:
    """Blocks by tokens committed, window, and drafts that verification accepted.

    Args:
        width: rows of a full window.
    """

    def __init__(self, width: int) -> None:
        self._often = np.zeros((width + 1,) * 3, np.int64)

    def add(
        self,
        live: Bool[np.ndarray, "n L"],
        commits: Int[np.ndarray, "n L"],
        window: Int[np.ndarray, "n L"],
        accepted: Int[np.ndarray, "n L"],
    ) -> None:
        """Count the blocks of n steps where ``live``."""
        size = len(self._often)
        index = (commits * size + window) * size + accepted
        often = np.bincount(index[live], minlength=self._often.size)
        self._often += often.reshape(self._often.shape)

    def totals(self) -> dict[str, int]:
        """Sums over all blocks."""
        often, commits, window, _ = self._kinds()
        proposed, accepted, trimmed = self._drafts()
        return {
            name: int(often @ values)
            for name, values in (
                ("verifications", np.ones_like(often)),
                ("tokens", commits),
                ("windows", window),
                ("proposed", proposed),
                ("accepted", accepted),
                ("trimmed", trimmed),
            )
        }

    def windows(self) -> Int[np.ndarray, "W"]:
        """Blocks by their window."""
        return self._often.sum(axis=(0, 2))

    def by_position(self) -> dict[str, Int[np.ndarray, "G"]]:
        """Drafts of each position: verified, reached (those before all accepted), accepted."""
        often = self._kinds()[0]
        proposed, accepted, _ = self._drafts()
        position = np.arange(1, len(self._often) - 1)[:, None]
        verified = position <= proposed
        return {
            "verified": verified @ often,
            "reached": (verified & (position <= accepted + 1)) @ often,
            "accepted": (position <= accepted) @ often,
        }

    def _kinds(self) -> tuple[np.ndarray, ...]:
        """How often each kind occurred that did, and what makes it."""
        found = np.nonzero(self._often)
        return self._often[found], *found

    def _drafts(self) -> tuple[np.ndarray, ...]:
        """Of each of these kinds: drafts proposed, committed, and cut though accepted."""
        _, commits, window, judged = self._kinds()
        proposed, accepted = drafts(commits, window, judged)
        cut = np.maximum(judged - window, 0)
        return proposed, accepted, np.where(commits > accepted, cut, 0)


def drafts(commits: np.ndarray, window: np.ndarray, judged: np.ndarray) -> tuple[np.ndarray, ...]:
    """Drafts proposed and accepted by blocks that verification accepted ``judged`` of.

    What lies behind an accepted stop was verified, and says nothing.
    """
    accepted = np.minimum(np.minimum(judged, window), commits)
    return np.where(commits > accepted, window, commits), accepted

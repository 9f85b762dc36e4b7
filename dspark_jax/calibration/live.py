"""Calibration error while serving: decayed bins of survival against what verification said.

Position j of a block has a label when it was verified: whether the first j drafts were all
accepted. A window ends where survival is low, so trimmed positions are missing; which ones depends
on the prediction alone, never on the drafts, and so no bin is biased. The error is that of the
positions verified. Numpy, on the host.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.calibration.metrics import BINS


class Bins:
    """Counts by position and bin of predicted survival, equal widths on [0, 1]."""

    def __init__(self, block_size: int) -> None:
        self.count = np.zeros((block_size, BINS))
        self.predicted = np.zeros((block_size, BINS))
        self.accepted = np.zeros((block_size, BINS))

    @property
    def error(self) -> Float[np.ndarray, "G"]:
        """Expected calibration error of each position, a share; NaN where nothing was verified."""
        return self._per_block(np.abs(self.predicted - self.accepted))

    @property
    def bias(self) -> Float[np.ndarray, "G"]:
        """Mean predicted survival less the share accepted: above 0 is overconfident."""
        return self._per_block(self.predicted - self.accepted)

    def _per_block(self, values: Float[np.ndarray, "G bins"]) -> Float[np.ndarray, "G"]:
        sums, blocks = values.sum(axis=1), self.count.sum(axis=1)
        return np.divide(sums, blocks, out=np.full_like(sums, np.nan), where=blocks > 0)


class LiveCalibration:
    """Bins of everything, and of what is recent: the two differ when calibration drifts.

    Args:
        block_size: positions, G.
        decay: what a recent count keeps at every step.
    """

    def __init__(self, block_size: int, decay: float) -> None:
        self.recent, self.lifetime = Bins(block_size), Bins(block_size)
        self._decay = decay

    def observe(
        self,
        survival: Float[np.ndarray, "n G"],
        verified: Int[np.ndarray, "n"],
        accepted: Int[np.ndarray, "n"],
        steps: int = 1,
    ) -> None:
        """Add the blocks of ``steps`` steps.

        Args:
            survival: predicted, calibrated, in [0, 1].
            verified: drafts that have a label (0 for an idle slot).
            accepted: drafts accepted.
            steps: by which older counts decay.
        """
        position = np.arange(1, survival.shape[1] + 1)
        known = position <= verified[:, None]
        bins = np.minimum((survival * BINS).astype(np.int64), BINS - 1)
        at = ((position - 1) * BINS + bins)[known]
        won: Bool[np.ndarray, "k"] = (position <= accepted[:, None])[known]
        kept = self._decay**steps
        for name, weights in (("count", None), ("predicted", survival[known]), ("accepted", won)):
            recent, lifetime = getattr(self.recent, name), getattr(self.lifetime, name)
            added = np.bincount(at, weights=weights, minlength=recent.size).reshape(recent.shape)
            recent *= kept
            recent += added
            lifetime += added

"""Drafted blocks that a target has verified: what calibration is fitted on and measured by."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

MINIMUM_REACHED = 500
"""Blocks that must reach a position before it gets a temperature of its own.

The conditional acceptance of 500 trials is known to within 0.022 (one standard deviation); with
less the fit would follow noise.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class VerifiedBlocks:
    """N blocks of G drafts with the confidence each draft had and what the target said.

    A position that was not verified, or that stands behind an accepted stop, says nothing: it
    has no label, even where an earlier rejection would give it one, for such labels are all
    negative.

    Attributes:
        logits: ``[N, G]`` uncalibrated confidence logits in float64; never NaN, -inf instead.
        accepted: ``[N]`` drafts accepted, at most ``verified``.
        verified: ``[N]`` leading positions that have a label.
    """

    logits: Float[np.ndarray, "N G"]
    accepted: Int[np.ndarray, "N"]
    verified: Int[np.ndarray, "N"]

    def __post_init__(self) -> None:
        """Count a NaN confidence as 0, as the scheduler does, and refuse impossible counts."""
        logits = np.asarray(self.logits, np.float64)
        object.__setattr__(self, "logits", np.where(np.isnan(logits), -np.inf, logits))
        wrong = (self.accepted > self.verified) | (self.accepted < 0)
        wrong |= self.verified > self.block_size
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(
                f"block {first} has {self.accepted[first]} accepted of {self.verified[first]} "
                f"verified drafts; wanted 0 <= accepted <= verified <= {self.block_size}"
            )

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.logits)

    @property
    def block_size(self) -> int:
        """Drafted positions of a block, G."""
        return self.logits.shape[1]

    @property
    def labelled(self) -> Bool[np.ndarray, "N G"]:
        """Positions whose outcome is known."""
        return self._positions <= self.verified[:, None]

    @property
    def survived(self) -> Bool[np.ndarray, "N G"]:
        """Whether a position and all before it were accepted: the cumulative event."""
        return self._positions <= self.accepted[:, None]

    @property
    def reached(self) -> Bool[np.ndarray, "N G"]:
        """Labelled positions with everything before them accepted: trials of the conditional."""
        return self.labelled & (self._positions <= self.accepted[:, None] + 1)

    @property
    def _positions(self) -> Int[np.ndarray, "1 G"]:
        return np.arange(1, self.block_size + 1)[None]

    def sparse(self, minimum: int = MINIMUM_REACHED) -> Bool[np.ndarray, "G"]:
        """Positions that fewer than ``minimum`` blocks reach."""
        return self.reached.sum(axis=0) < minimum


def cumulative_survival(
    logits: Float[np.ndarray, "N G"], temperatures: Float[np.ndarray, "G"]
) -> Float[np.ndarray, "N G"]:
    """Survival a_j = Π_{i<=j} σ(z_i / T_i) in float64 (``schedule.survival`` is the device's)."""
    return np.cumprod(sigmoid(logits / temperatures), axis=1)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """σ in float64 without overflow."""
    tail = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, tail) / (1.0 + tail)

"""How well probabilities fit what happened: ECE, AUROC, Brier, and the bins of a reliability plot.

Everything is numpy in float64, vectorised, and takes flat arrays ``[n]`` of one position.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

BINS = 15
"""Equal-width bins of the calibration error (DSpark paper, section 3)."""


@dataclasses.dataclass(frozen=True)
class ReliabilityBins:
    """Equal-width bins of predicted probability on [0, 1], as a reliability diagram draws them.

    Attributes:
        count: samples of each bin ``[bins]``.
        predicted: mean probability of each bin ``[bins]``, NaN where it is empty.
        observed: share of positive labels of each bin ``[bins]``, NaN where it is empty.
    """

    count: Int[np.ndarray, "bins"]
    predicted: Float[np.ndarray, "bins"]
    observed: Float[np.ndarray, "bins"]

    @property
    def error(self) -> float:
        """Expected calibration error: |predicted - observed|, weighted by count."""
        filled = self.count > 0
        gap = np.abs(self.predicted[filled] - self.observed[filled])
        return float((self.count[filled] * gap).sum() / self.count.sum())


def reliability_bins(probability: ArrayLike, label: ArrayLike, bins: int = BINS) -> ReliabilityBins:
    """Sort probabilities into ``bins`` of equal width; 1 belongs to the last bin.

    Args:
        probability: ``[n]`` in [0, 1].
        label: ``[n]`` what happened, 0 or 1 or bool.
        bins: number of bins.

    Raises:
        ValueError: no sample, shapes that differ, a probability outside [0, 1] or not a number,
            a label that is neither 0 nor 1, or fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; wanted 1 or more")
    probability, happened = _pair(probability, label)
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError(
            f"probabilities must lie in [0, 1], found {np.nanmin(probability):g} to "
            f"{np.nanmax(probability):g} and {np.isnan(probability).sum()} NaN"
        )
    which = np.minimum((probability * bins).astype(np.int64), bins - 1)
    count = np.bincount(which, minlength=bins)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(which, weights=probability, minlength=bins) / count
        observed = np.bincount(which, weights=happened, minlength=bins) / count
    return ReliabilityBins(count, predicted, observed)


def expected_calibration_error(probability: ArrayLike, label: ArrayLike, bins: int = BINS) -> float:
    """Mean over samples of |mean probability - share of positives| of the sample's bin.

    Arguments and errors are those of ``reliability_bins``. A share, not a percentage.
    """
    return reliability_bins(probability, label, bins).error


def auroc(score: ArrayLike, label: ArrayLike) -> float:
    """Probability that a positive scores above a negative, ties counting half.

    Exact, by ranks; NaN when all labels are the same, for there is nothing to tell apart.

    Args:
        score: ``[n]`` any order-preserving score; infinities are scores like others.
        label: ``[n]`` 0 or 1 or bool.

    Raises:
        ValueError: no sample, shapes that differ, a NaN score, or a label neither 0 nor 1.
    """
    score, happened = _pair(score, label)
    if np.isnan(score).any():
        raise ValueError(f"scores must be numbers, found {np.isnan(score).sum()} NaN")
    positives = happened.sum()
    negatives = happened.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, which, count = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    rank_sum = mean_rank[which][happened].sum()
    return float((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))


def brier(probability: ArrayLike, label: ArrayLike) -> float:
    """Mean squared distance of probability and label.

    Raises:
        ValueError: no sample, shapes that differ, or a label neither 0 nor 1.
    """
    probability, happened = _pair(probability, label)
    return float(np.mean((probability - happened) ** 2))


def _pair(
    value: ArrayLike, label: ArrayLike
) -> tuple[Float[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
    """Values in float64 and labels as bool, checked to belong together."""
    values, labels = np.asarray(value, np.float64), np.asarray(label)
    if values.ndim != 1 or values.shape != labels.shape:
        raise ValueError(
            f"values have shape {values.shape}, labels {labels.shape}; wanted one axis of "
            "the same length"
        )
    if values.size == 0:
        raise ValueError("no sample; wanted at least one")
    if labels.dtype != np.bool_ and not np.isin(labels, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1, found {np.unique(labels)[:5].tolist()}")
    return values, labels.astype(bool)

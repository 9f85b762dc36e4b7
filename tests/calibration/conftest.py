"""Synthetic verified blocks whose true temperatures are known."""

from collections.abc import Callable

import numpy as np
import pytest

from dspark_jax.calibration.blocks import VerifiedBlocks, sigmoid


def _synthetic(temperatures, count, *, seed=0, spread=2.5, shift=1.0):
    """Blocks whose drafts are accepted with σ(logit / temperature), each given those before it."""
    random = np.random.default_rng(seed)
    logits = shift + spread * random.normal(size=(count, len(temperatures)))
    won = random.uniform(size=logits.shape) < sigmoid(logits / np.asarray(temperatures))
    accepted = np.cumprod(won, axis=1).sum(axis=1)
    return VerifiedBlocks(logits, accepted, np.full(count, len(temperatures)))


@pytest.fixture(scope="session")
def synthetic() -> Callable[..., VerifiedBlocks]:
    return _synthetic

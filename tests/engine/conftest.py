"""A pair that sums its text: one wrong cache row changes the answer, and every answer is known."""

import dataclasses

import numpy as np
import pytest

from dspark_jax.engine.engine import Engine
from dspark_jax.testing.summing import sum_of
from tests.engine.small import DRAFTER, SMALL, STOP, TARGET, VOCAB, WEIGHTS


@pytest.fixture(scope="session")
def make_engine():
    """A small engine with fields of its config changed."""

    def make(drafter=DRAFTER, **changes):
        return Engine(TARGET, drafter, dataclasses.replace(SMALL, **changes))

    return make


@pytest.fixture(scope="session")
def solo():
    """What the target says alone at temperature 0, in plain Python."""
    best = np.asarray(WEIGHTS[0].logits).argmax(axis=1)

    def answer(prompt, max_new_tokens, context=SMALL.max_context):
        text = list(prompt)
        while len(text) - len(prompt) < max_new_tokens and len(text) < context:
            text.append(int(best[sum_of(text, VOCAB)]))
            if text[-1] == STOP:
                break
        return tuple(text[len(prompt) :])

    return answer

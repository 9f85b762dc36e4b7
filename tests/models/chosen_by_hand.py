"""What an indexer must choose, row by row, where every number is small enough to be exact."""

import numpy as np


def ternary(random, *shape):
    """-1 and 1, few enough that many products are 0 and many scores equal."""
    return random.choice([-1.0, 0.0, 1.0], shape, p=[0.06, 0.88, 0.06]).astype(np.float32)


def scores(query, weight, keys):
    """``[K]`` of one token."""
    return weight @ np.maximum(query @ keys.T, 0)


def best(scores, count):
    """The ``count`` highest, later before earlier among equals."""
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], -at))
    return sorted(order[:count])


def ties(scores, count):
    """Whether equal scores lie on both sides of the choice."""
    ranked = np.sort(scores)[::-1]
    return count < len(scores) and ranked[count - 1] == ranked[count]

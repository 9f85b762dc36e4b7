"""Trees as the plain lists of their arrays, which JAX takes apart in C++ at every call.

Trees of dataclasses are taken apart and compared in Python: of a launch with the 300 arrays of a
small model and its state that was more than half.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """What makes trees of lists again; as a static argument compared by identity.

    Attributes:
        parts: structures of trees, or layouts of packed arrays.
    """

    parts: tuple[Any, ...]


@functools.cache
def structure_of(*parts: Any) -> Structure:
    """The one of these parts: equal ones are the same object, so that programs are shared."""
    return Structure(parts)


def touched(
    change: Callable[..., list[Any]], leaves: Sequence[jax.Array], *operands: Any
) -> tuple[int, ...]:
    """Places in a list of those that ``change(leaves, *operands)`` does not hand on as they are.

    Empty ones are among them: what is written to them leaves them what they are.
    """
    places: list[int] = []

    def trace(leaves: list[Any], *operands: Any) -> list[Any]:
        after = change(leaves, *operands)
        pairs = zip(leaves, after, strict=True)
        changed = (old is not new or not old.size for old, new in pairs)
        places.extend(place for place, found in enumerate(changed) if found)
        return after

    jax.eval_shape(trace, list(leaves), *operands)
    return tuple(places)

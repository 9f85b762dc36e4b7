"""Trees as lists of their arrays."""

import jax
import jax.numpy as jnp

from dspark_jax.engine.leaves import structure_of, touched


def test_equal_parts_are_one_structure():
    tree = {"a": 1, "b": (2, 3)}
    first, second = (structure_of(jax.tree.structure(tree), shape) for shape in ("x", "x"))
    assert first is second
    assert structure_of(jax.tree.structure(tree), "y") is not first


def test_what_is_handed_on_is_not_touched_but_for_the_empty():
    def change(leaves, by):
        first, second, empty = leaves
        return [first, second.at[0].add(by), empty.at[:].add(by)]

    leaves = [jnp.zeros(2), jnp.zeros(3), jnp.zeros((2, 0))]
    assert touched(change, leaves, jnp.ones(())) == (1, 2)

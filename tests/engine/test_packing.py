"""Trees of small arrays on their way between host and device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.engine.packing import pack, unpack

TREE = {
    "flags": np.array([[True, False], [False, True]]),
    "whole": np.array([-1, 2, 2**31 - 1], np.int32),
    "seeds": np.array([2**32 - 1, 0], np.uint32),
    "real": np.array([[0.1, np.nan, -np.inf]], np.float32),
    "one": np.float32(2.5).reshape(()),
    "none": None,
    "empty": np.zeros((0, 4), np.int32),
}


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


def test_what_was_packed_on_the_host_is_unpacked_on_the_device_and_back():
    packed = pack(TREE)
    assert packed.words.shape == (4 + 3 + 2 + 3 + 1,)
    same(unpack(packed), TREE)
    there = jax.jit(unpack)(jax.device_put(packed))
    same(there, jax.tree.map(jnp.asarray, TREE))
    same(unpack(jax.device_get(jax.jit(lambda tree: pack(tree))(there))), TREE)


def test_trees_of_one_layout_share_a_program():
    traces = []

    @jax.jit
    def total(packed):
        traces.append(packed.layout)
        return unpack(packed)["a"].sum()

    for value in (1, 2):
        packed = jax.device_put(pack({"a": np.full(3, value, np.float32)}))
        assert total(packed) == 3 * value
    assert len(traces) == 1


def test_other_widths_are_refused():
    with pytest.raises(TypeError, match="dtype int64; wanted bool or one of 32 bits"):
        pack({"a": np.zeros(2, np.int64)})

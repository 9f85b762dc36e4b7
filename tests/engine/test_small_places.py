"""What an engine holds so that small arrays find small places."""

import collections

from dspark_jax.engine.small_places import PLACES, SIZES, keep_places


def test_a_gpu_keeps_arrays_of_every_size_apart_and_a_cpu_none():
    assert keep_places("cpu") == []
    held = keep_places("gpu")
    assert collections.Counter(array.nbytes for array in held) == dict.fromkeys(SIZES, PLACES + 1)
    assert sum(array.nbytes for array in held) < 34 << 20

"""Window rows: every implementation against lists written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.swa_index import pallas_triton, swa_index
from pallas_kernels.swa_index.shapes import SHAPES

LENGTH = 9
INTERPRETED = functools.partial(
    pallas_triton.swa_index, tuning=pallas_triton.Tuning(4, 1), interpret=True
)


@pytest.fixture(
    scope="module",
    params=["xla", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)],
)
def run(request):
    interpreted = request.param == "triton, interpreted"
    call = functools.partial(swa_index, implementation=request.param)
    return jax.jit(INTERPRETED if interpreted else call, static_argnums=(4, 5))


def operands():
    """Three requests, the second without a ring; the text's begin, padding, a wrapped ring."""
    position = jnp.asarray([0, 1, 2, -1, 30, 31, 32, 200, -1, 17], jnp.int32)
    request = jnp.asarray([0, 0, 0, 3, 1, 1, 1, 2, 3, 2], jnp.int32)
    ring = jnp.asarray([4, -1, 7], jnp.int32)
    return position, request, ring, jnp.asarray([-6, 20, 10], jnp.int32)


def by_hand(position, request, ring, origin, window):
    rows = np.full((len(position), window), -1)
    for t, (last, owner) in enumerate(zip(position, request, strict=True)):
        for column, p in enumerate(range(max(0, int(last) - window + 1), int(last) + 1)):
            if ring[owner] >= 0:
                rows[t, column] = ring[owner] * LENGTH + (p - origin[owner]) % LENGTH
    return rows, [min(int(last) + 1, window) for last in position]


@pytest.mark.parametrize("window", [1, 5, 8])
def test_windows_are_listed_from_the_oldest_row_on(run, window):
    case = operands()
    rows, count = run(*case, window, LENGTH)
    assert rows.dtype == count.dtype == jnp.int32
    want_rows, want_count = by_hand(*map(np.asarray, case), window=window)
    np.testing.assert_array_equal(rows, want_rows)
    np.testing.assert_array_equal(count, want_count)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    tokens = jnp.zeros(shape.requests * shape.width, jnp.int32)
    rings = jnp.zeros(shape.requests, jnp.int32)
    assert pallas_triton.unsupported(tokens, tokens, rings, rings) is None
    text = lowered_for_hopper(
        lambda *arrays: pallas_triton.swa_index(*arrays, shape.window, shape.length),
        tokens,
        tokens,
        rings,
        rings,
    )
    assert text.count("xla.gpu.triton") == 1


def test_the_kernel_says_what_it_does_not_support():
    position, request, ring, origin = operands()
    says = pallas_triton.unsupported(position, request, ring.astype(jnp.int16), origin)
    assert says == "the dtype of ring is int16, wanted int32"
    says = pallas_triton.unsupported(position[:0], request[:0], ring, origin)
    assert says == "position is empty, wanted at least one entry"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back():
    case = operands()
    with pytest.raises(NotImplementedError, match="swa_index cannot run"):
        swa_index(*case, 5, LENGTH, implementation="triton")
    rows, _ = swa_index(*case, 5, LENGTH)
    np.testing.assert_array_equal(rows, by_hand(*map(np.asarray, case), window=5)[0])


def test_operands_that_disagree_are_refused():
    position, request, ring, origin = operands()
    with pytest.raises(ValueError, match=r"position and request have shapes .* wanted \[T\]"):
        swa_index(position, request[1:], ring, origin, 5, LENGTH)
    with pytest.raises(ValueError, match=r"ring and origin have shapes .* wanted \[A\]"):
        swa_index(position, request, ring, origin[1:], 5, LENGTH)
    with pytest.raises(ValueError, match="window is 0 and length 9, wanted at least 1"):
        swa_index(position, request, ring, origin, 0, LENGTH)

"""Products of blocks: every implementation against products written out, and legality on Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_linear import block_linear, pallas_triton
from pallas_kernels.block_linear.shapes import SHAPES

ROWS, MATRICES, COLUMNS, DEPTH = 9, 3, 128, 128


@pytest.fixture(
    scope="module",
    params=["xla", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)],
)
def run(request):
    interpreted = functools.partial(pallas_triton.block_linear, interpret=True)
    call = functools.partial(block_linear, implementation=request.param)
    return jax.jit(interpreted if request.param == "triton, interpreted" else call)


def operands(size):
    """Three blocks, two of one matrix; rows that stand twice and rows that are none."""
    random = np.random.default_rng(size)
    x = random.standard_normal((ROWS, DEPTH), np.float32)
    matrices = random.standard_normal((MATRICES, COLUMNS, DEPTH), np.float32)
    row = random.integers(0, ROWS, (4, size))
    row[0, 3], row[1, 5] = ROWS, -1
    owner = [2, 0, 0, MATRICES]
    narrow = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    return narrow(x), jnp.asarray(row, jnp.int32), narrow(matrices), jnp.asarray(owner, jnp.int32)


@pytest.mark.parametrize("size", [16, 64])
def test_each_row_of_a_block_is_multiplied_by_the_matrix_of_its_block(run, size):
    x, row, matrices, owner = case = operands(size)
    got = run(*case)
    assert got.shape == (4, size, COLUMNS)
    assert got.dtype == jnp.bfloat16
    x, matrices = np.asarray(x, np.float32), np.asarray(matrices, np.float32)
    for block, one in enumerate(np.asarray(owner)[:3]):
        here = np.asarray(row)[block]
        known = (here >= 0) & (here < ROWS)
        want = np.where(known[:, None], x[np.where(known, here, 0)], 0) @ matrices[one].T
        np.testing.assert_allclose(np.asarray(got[block], np.float32), want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    x = jax.ShapeDtypeStruct((shape.rows, shape.depth), jnp.bfloat16)
    matrices = jax.ShapeDtypeStruct((shape.matrices, shape.columns, shape.depth), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((shape.blocks, shape.size), jnp.int32)
    owner = jax.ShapeDtypeStruct((shape.blocks,), jnp.int32)
    assert pallas_triton.unsupported(x, matrices, shape.size) is None
    text = lowered_for_hopper(pallas_triton.block_linear, x, row, matrices, owner)
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.parametrize("matrices", [128, 129, 256])
def test_matrices_may_hold_more_numbers_than_int32_counts(lowered_for_hopper, matrices):
    """2^31 numbers are the last that 32 bits address: 4 GiB, beyond which Pallas takes 64."""
    x, all_of_them = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 4096), (matrices, 4096, 4096))
    )
    row, owner = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 16), (3,)))
    assert pallas_triton.unsupported(x, all_of_them, 16) is None
    assert lowered_for_hopper(pallas_triton.block_linear, x, row, all_of_them, owner)


@pytest.mark.parametrize(
    ("x", "matrices", "size", "says"),
    [
        ((4, 64), (2, 128, 64), 8, "blocks have 8 rows, wanted one of 16, 32, 64, 128"),
        ((4, 64), (2, 100, 64), 16, "O is 100, wanted a multiple of 128"),
        ((4, 32), (2, 128, 32), 16, "I is 32, wanted a multiple of 64"),
        ((0, 64), (2, 128, 64), 16, "x is empty"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(x, matrices, size, says):
    x, matrices = (jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in (x, matrices))
    assert says in (pallas_triton.unsupported(x, matrices, size) or "")
    wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    assert "the dtype of x is float32" in (pallas_triton.unsupported(wide, matrices, size) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises():
    with pytest.raises(NotImplementedError, match="block_linear cannot run"):
        block_linear(*operands(16), implementation="triton")


def test_shapes_that_disagree_are_refused():
    x, row, matrices, owner = operands(16)
    with pytest.raises(ValueError, match=r"row and owner .* wanted \[B, S\], \[B\]"):
        block_linear(x, row, matrices, owner[1:])
    with pytest.raises(ValueError, match=r"x and matrices .* wanted \[R, I\], \[X, O, I\]"):
        block_linear(x[:, 1:], row, matrices, owner)

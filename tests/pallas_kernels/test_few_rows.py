"""A few bf16 rows on a CPU: the same numbers as any product, and no fp32 copy of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_linear.few_rows import LANES, MOST_ROWS, lanes_of, rows_product
from pallas_kernels.row_linear.reference import linear

OUTPUTS = 24


def operands(width, rows=1):
    random = np.random.default_rng(width)
    # from NumPy: JAX would compile its generator for every shape
    x, weight = (random.normal(size=(count, width)) for count in (rows, OUTPUTS))
    return jax.device_put((x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)))


def exact(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def temporary_bytes(function, *shapes):
    memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("width", [20, 48, 64, 128, 600, 576, 1536, 11008])
@pytest.mark.parametrize("rows", [1, MOST_ROWS, 12])
def test_rows_are_accumulated_in_fp32_at_any_width(width, rows):
    x, weight = operands(width, rows)
    found = linear(x, weight, jnp.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact(x, weight), rtol=1e-5, atol=1e-5 * width**0.5)
    rounded = linear(x[None], weight)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded[0], found.astype(jnp.bfloat16))


def test_a_row_is_the_same_to_the_bit_beside_any_others():
    x, weight = operands(576, MOST_ROWS)
    together = linear(x, weight)
    for row in range(MOST_ROWS):
        np.testing.assert_array_equal(linear(x[row : row + 1], weight)[0], together[row])


def test_wide_rows_take_more_lanes_and_narrow_or_odd_ones_none():
    assert lanes_of(64) == lanes_of(576) == 16
    assert lanes_of(1536) == 32
    assert lanes_of(11008) == 256
    assert lanes_of(48) is lanes_of(600) is None


def test_the_weights_are_not_widened_in_memory():
    weight = jax.ShapeDtypeStruct((512, 576), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, 576), jnp.bfloat16)
    assert temporary_bytes(linear, row, weight) < 2 * 512 * LANES * 4


def test_a_loop_does_not_widen_its_constant_weights_beforehand():
    def decode(row, weight):
        return jax.lax.fori_loop(0, 9, lambda _, row: linear(row, weight), row)

    row = jax.ShapeDtypeStruct((1, 576), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((576, 576), jnp.bfloat16)
    assert temporary_bytes(decode, row, weight) < 2 * 576 * LANES * 4


def test_gradients_and_vmap_pass_through():
    x, weight = operands(128)
    slope = jax.grad(lambda row: rows_product(row, weight, 32).sum())(x.astype(jnp.float32))
    np.testing.assert_allclose(
        slope[0], weight.astype(jnp.float32).sum(axis=0), rtol=1e-5, atol=1e-5
    )
    many = jax.vmap(linear, (0, None))(jnp.stack([x, 2 * x]), weight)
    np.testing.assert_array_equal(many[1], 2 * many[0])

"""Eight-bit cache rows: their bytes, what is lost, and where they stand in a page."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import kv_quant
from pallas_kernels.kv_quant import V3_2, V4, empty_pages

LAYOUTS = {"v3.2": V3_2, "v4": V4}
quantise = jax.jit(kv_quant.quantise, static_argnums=1)
dequantise = jax.jit(kv_quant.dequantise, static_argnums=(1, 2))
write = jax.jit(kv_quant.write, static_argnums=(3, 4))
read = jax.jit(kv_quant.read, static_argnums=(2, 3, 4))


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def rows(count, layout, scale=1.0):
    rng = np.random.default_rng(count)
    values = rng.standard_normal((count, layout.width), np.float32) * scale
    return jnp.asarray(values, jnp.bfloat16)


def by_hand(row, layout):
    """Bytes of one row, block by block, with NumPy's own types."""
    row = np.asarray(row, np.float32)
    numbers, scales = b"", []
    for start in range(0, layout.quantised, layout.block):
        block = row[start : start + layout.block]
        scale = 2.0 ** np.ceil(np.log2(max(np.abs(block).max() / 448, 1e-4)))
        scales.append(scale)
        numbers += (block / scale).astype(ml_dtypes.float8_e4m3fn).tobytes()
    plain = row[layout.quantised :].astype(ml_dtypes.bfloat16).tobytes()
    if layout is V3_2:
        return numbers + np.asarray(scales, np.float32).tobytes() + plain
    exponents = bytes(int(np.log2(scale)) + 127 for scale in scales)
    return numbers + plain + exponents + bytes(1)


def test_rows_have_the_sizes_of_the_published_layouts():
    assert V3_2.row_bytes == 656
    assert V4.row_bytes == 584
    # vLLM's pages of 64 and 2 rows of V4.
    assert V4.page_bytes(64) == 37440
    assert V4.page_bytes(2) == 1728


def test_bytes_are_those_of_the_layout(layout):
    values = rows(3, layout).at[1].multiply(300).at[2, :200].set(0)
    got = np.asarray(quantise(values, layout))
    for mine, row in zip(got, values, strict=True):
        assert mine.tobytes() == by_hand(row, layout)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_number_loses_at_most_a_sixteenth_and_bf16_nothing_more(layout, scale):
    values = rows(4, layout, scale)
    packed = quantise(values, layout)
    wide = np.asarray(dequantise(packed, layout, jnp.float32))
    np.testing.assert_array_equal(np.asarray(dequantise(packed, layout), np.float32), wide)
    values = np.asarray(values, np.float32)
    np.testing.assert_array_equal(wide[:, layout.quantised :], values[:, layout.quantised :])
    # Three bits of mantissa; subnormal e4m3 numbers are 2^-9 of a scale that is at least 2^-13.
    np.testing.assert_allclose(wide, values, rtol=1 / 16, atol=scale * 5 / 448 * 2**-9 + 2**-22)


def test_a_block_whose_largest_number_is_448_keeps_a_scale_of_one():
    values = jnp.zeros((1, V4.width)).at[0, 3].set(448.0).at[0, 70].set(449.0)
    packed = np.asarray(quantise(values, V4))[0]
    assert packed[576] == 127
    assert packed[577] == 128  # just above 448: twice the scale, so that it does not overflow
    assert np.isfinite(np.asarray(dequantise(packed, V4), np.float32)).all()


def test_written_rows_are_read_back_and_others_left_alone(layout):
    values, slots = rows(5, layout), jnp.asarray([7, 0, -1, 11, 12])
    pool = empty_pages(4, 3, layout) + jnp.uint8(9)
    got = write(pool, slots, values, layout, 3)
    assert got.shape == pool.shape
    inside = np.array([0, 1, 3])
    want = dequantise(quantise(values[inside], layout), layout)
    np.testing.assert_array_equal(read(got, slots[inside], layout, 3), want)
    changed = np.asarray(got != pool).reshape(4, -1).any(axis=1)
    np.testing.assert_array_equal(changed, [True, False, True, True])
    others = jnp.asarray([1, 2, 3, 4, 5, 6, 8, 9, 10])
    before = read(pool, others, layout, 3, jnp.float32)
    np.testing.assert_array_equal(read(got, others, layout, 3, jnp.float32), before)


def test_rows_of_another_width_are_refused(layout):
    with pytest.raises(ValueError, match=f"rows are 500 wide, wanted {layout.width}"):
        quantise(jnp.zeros((2, 500)), layout)
    with pytest.raises(ValueError, match=f"rows have 500 bytes, wanted {layout.row_bytes}"):
        dequantise(jnp.zeros((2, 500), jnp.uint8), layout)

"""Eight-bit cache rows: their bytes, what is lost, and where they stand in a page."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import kv_quant
from pallas_kernels.kv_quant import V3_2, V4, empty_pages, pallas_triton, reference
from pallas_kernels.kv_quant.shapes import SHAPES

LAYOUTS = {"v3.2": V3_2, "v4": V4}
quantise = jax.jit(kv_quant.quantise, static_argnums=1)
dequantise = jax.jit(kv_quant.dequantise, static_argnums=(1, 2))
read = jax.jit(kv_quant.read, static_argnums=(2, 3, 4))


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture(
    params=[
        "xla",
        "triton, a row",
        "triton, rows",
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def write(request):
    call = {
        "triton, a row": functools.partial(
            pallas_triton.write, tuning=pallas_triton.FEW, interpret=True
        ),
        "triton, rows": functools.partial(
            pallas_triton.write, tuning=pallas_triton.MANY, interpret=True
        ),
    }.get(request.param, functools.partial(kv_quant.write, implementation=request.param))
    return jax.jit(call, static_argnums=(3, 4))


def rows(count, layout, scale=1.0):
    rng = np.random.default_rng(count)
    values = rng.standard_normal((count, layout.width), np.float32) * scale
    # rounded on the host, where no shape is a program to compile
    return jax.device_put(values.astype(jnp.bfloat16))


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


def test_written_rows_are_read_back_and_others_left_alone(write, layout):
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


def test_bytes_written_are_those_of_the_definition_wherever_a_number_falls(write, layout):
    """Every magnitude of bf16, ties and zeros of both signs, in pages with room to spare."""
    random = np.random.default_rng(3)
    values = random.standard_normal((6, layout.width)).astype(np.float32)
    values[0] = np.ldexp(values[0], random.integers(-140, 120, layout.width))
    values[1] = random.integers(-128, 129, layout.width) / 8 * 2.0 ** random.integers(-4, 1)
    values[2] = random.choice([-0.0, 0.0, 448.0, -449.0, 1.75 * 2.0**-13], layout.width)
    values[3] = random.choice([-3.3e38, 2.0**-133, 1.0], layout.width)
    values[4, : layout.width // 2] = 0
    values = jnp.asarray(values, jnp.bfloat16)
    stride = layout.page_bytes(2) + 48
    pool = jnp.full((4, stride), 9, jnp.uint8)
    slots = jnp.asarray([7, 2, 8, 0, -1, 3], jnp.int32)
    got = np.asarray(write(pool, slots, values, layout, 2))
    want = np.full((4, stride), 9, np.uint8)
    for slot, packed in zip(np.asarray(slots), np.asarray(quantise(values, layout)), strict=True):
        if 0 <= slot < 8:
            page, offset = want[slot // 2], slot % 2
            if layout is V3_2:
                page[656 * offset :][:656] = packed
            else:
                page[576 * offset :][:576] = packed[:576]
                page[2 * 576 + 8 * offset :][:8] = packed[576:]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper_with_the_pool_in_place(lowered_for_hopper, name):
    shape = SHAPES[name]
    pool = jax.eval_shape(lambda: empty_pages(shape.pages, shape.page_size, shape.layout))
    slots = jax.ShapeDtypeStruct((shape.rows,), jnp.int32)
    values = jax.ShapeDtypeStruct((shape.rows, shape.layout.width), jnp.bfloat16)
    assert pallas_triton.unsupported(pool, slots, values, shape.layout) is None
    text = lowered_for_hopper(
        lambda *arrays: pallas_triton.write(*arrays, shape.layout, shape.page_size),
        pool,
        slots,
        values,
    )
    assert text.count("xla.gpu.triton") == 1
    assert "output_operand_alias" in text


def test_the_kernel_says_what_it_does_not_support(layout):
    pool, slots = empty_pages(2, 2, layout), jnp.zeros(1, jnp.int32)
    says = pallas_triton.unsupported(pool, slots, jnp.zeros((1, layout.width)), layout)
    assert says == "the dtype of rows is float32, wanted bfloat16"
    large = jax.ShapeDtypeStruct((3, 1 << 30), jnp.uint8)
    says = pallas_triton.unsupported(large, slots, rows(1, layout), layout)
    assert says == "pool has 3221225472 bytes, wanted at most 2^31 or more than 2^32"


@pytest.mark.parametrize(("pages", "kernel"), [(2, True), (3, False), (4, False), (5, True)])
def test_a_pool_that_the_kernel_cannot_address_is_written_by_xla(monkeypatch, pages, kernel):
    """Pages of 1 GiB on a machine that has the GPU."""
    monkeypatch.setattr("pallas_kernels.kv_quant.api.missing_hopper", lambda: None)
    pool, slots = jax.ShapeDtypeStruct((pages, 1 << 30), jnp.uint8), jnp.zeros(1, jnp.int32)

    def taken(implementation):
        def run(pool):
            return kv_quant.write(pool, slots, rows(1, V4), V4, 2, implementation=implementation)

        return "pallas_call" in str(jax.make_jaxpr(run)(pool))

    assert taken(None) == kernel
    if not kernel:
        with pytest.raises(NotImplementedError, match=rf"pool has {pages << 30} bytes, wanted at"):
            taken("triton")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
def test_triton_without_a_gpu_raises_and_the_default_falls_back():
    case = empty_pages(2, 2, V4), np.zeros(1, np.int32), rows(1, V4), V4, 2
    with pytest.raises(NotImplementedError, match=r"kv_quant\.write cannot run"):
        kv_quant.write(*case, implementation="triton")
    found, wanted = (
        jax.jit(f, static_argnums=(3, 4))(*case) for f in (kv_quant.write, reference.write)
    )
    np.testing.assert_array_equal(found, wanted)


def test_a_page_too_short_and_shapes_that_disagree_are_refused():
    pool, slots = empty_pages(2, 2, V4), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="a page has 1728 bytes, wanted 1752 for 3 rows"):
        kv_quant.write(pool, slots, rows(1, V4), V4, 3)
    with pytest.raises(ValueError, match=r"wanted .*, \[T\] and \[T, 512\]"):
        kv_quant.write(pool, slots, rows(2, V4), V4, 2)


def test_rows_of_another_width_are_refused(layout):
    with pytest.raises(ValueError, match=f"rows are 500 wide, wanted {layout.width}"):
        quantise(jnp.zeros((2, 500)), layout)
    with pytest.raises(ValueError, match=f"rows have 500 bytes, wanted {layout.row_bytes}"):
        dequantise(jnp.zeros((2, 500), jnp.uint8), layout)

"""RoPE and cache writes: one suite over every implementation, and legality on Hopper."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import pallas_triton, reference, rope_write
from pallas_kernels.rope_write.shapes import SHAPES, Shape

EPS = 1e-5


def interpreted(tuning):
    return functools.partial(pallas_triton.rope_write, tuning=tuning, interpret=True)


@pytest.fixture(
    params=["xla", "triton, a row", "triton, rows", pytest.param("triton", marks=pytest.mark.gpu)]
)
def run(request: pytest.FixtureRequest) -> Callable:
    if request.param == "triton, a row":
        return interpreted(pallas_triton.FEW)
    if request.param == "triton, rows":
        return interpreted(pallas_triton.MANY)

    @functools.partial(jax.jit, static_argnums=(9, 10))
    def call(*operands):
        *arrays, q_norm, k_norm, eps, finite = operands
        return rope_write(
            *arrays,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            finite=finite,
            implementation=request.param,
        )

    return call


def operands(shape: Shape, seed: int = 0):
    """Random operands; every row has a place of its own in the cache."""
    random = np.random.default_rng(seed)

    def draw(*sizes):
        # rounded on the host, where no shape is a program to compile
        return jax.device_put(random.standard_normal(sizes, np.float32).astype(jnp.bfloat16))

    fused = draw(shape.rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    cache = (shape.slots, shape.kv_heads, shape.capacity, shape.head_dim)
    place = random.permutation(shape.slots * shape.capacity)[: shape.rows]
    angle = random.uniform(0, 6, (shape.rows, shape.head_dim // 2)).astype(np.float32)
    norms = [1 + 0.1 * draw(shape.head_dim) if shape.normed else None for _ in range(2)]
    return (
        fused,
        *(jax.device_put(wave(angle)) for wave in (np.cos, np.sin)),
        draw(*cache),
        draw(*cache),
        *jax.device_put([part.astype(np.int32) for part in np.divmod(place, shape.capacity)]),
        *norms,
        EPS,
        False,
    )


def by_hand(fused, cos, sin, keys, values, slot, position, q_norm, k_norm, eps, finite):
    """Each head by itself, in NumPy at double precision."""
    fused, cos, sin, keys, values = (
        np.array(x, np.float64) for x in (fused, cos, sin, keys, values)
    )
    slots, groups, capacity, width = keys.shape
    rows = fused.reshape(len(fused), -1, width)
    heads = rows.shape[1] - 2 * groups

    def turned(row, t, norm):
        if norm is not None:
            row = row / np.sqrt((row**2).mean() + eps) * np.asarray(norm, np.float64)
        first, second = np.split(row, 2)
        return np.concatenate([first * cos[t] - second * sin[t], second * cos[t] + first * sin[t]])

    query = np.zeros((len(rows), heads, width))
    for t, row in enumerate(rows):
        for h in range(heads):
            query[t, h] = turned(row[h], t, q_norm)
        if 0 <= slot[t] < slots and 0 <= position[t] < capacity:
            for n in range(groups):
                keys[slot[t], n, position[t]] = turned(row[heads + n], t, k_norm)
                values[slot[t], n, position[t]] = row[heads + groups + n]
    return query, keys, values


def agree(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(np.asarray(mine, np.float64), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads", [3, 0])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rotated_and_rows_land_at_their_place(run, heads, normed):
    case = operands(Shape(5, heads, 2, 32, 3, 7, normed))
    agree(run(*case), by_hand(*case))


def test_rows_outside_the_cache_write_nothing_and_the_rest_of_it_stays(run):
    fused, cos, sin, keys, values, slot, position, *rest = operands(Shape(6, 2, 1, 32, 2, 8))
    keys, values = jnp.full_like(keys, 7), jnp.full_like(values, 7)
    slot = jnp.asarray([-1, 2, 0, 1, 1, 9])
    position = jnp.asarray([3, 3, 8, -1, 0, 0])
    case = (fused, cos, sin, keys, values, slot, position, *rest)
    query, keys, values = run(*case)
    agree((query, keys, values), by_hand(*case))
    for cache in (keys, values):
        changed = np.asarray(cache != 7).any(axis=(1, 3))
        assert np.argwhere(changed).tolist() == [[1, 0]]


def test_broken_numbers_are_cached_as_finite_ones_only_when_asked(run):
    fused, *rest, _ = operands(Shape(2, 1, 1, 32, 1, 4))
    fused = fused.at[0].set(jnp.nan).at[1].set(jnp.inf)
    _, keys, values = run(fused, *rest, True)
    assert jnp.isfinite(keys).all()
    assert float(values.max()) == float(jnp.finfo(jnp.bfloat16).max)
    _, keys, values = run(fused, *rest, False)
    assert jnp.isnan(keys).any()
    assert jnp.isinf(values).any()


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper_with_caches_in_place(lowered_for_hopper, name):
    shape = SHAPES[name]
    # caches only as large as the most rows ask for
    *arrays, eps, finite = operands(Shape(**{**vars(shape), "capacity": 256, "slots": 64}))
    assert pallas_triton.unsupported(arrays[0], arrays[3], arrays[4]) is None
    text = lowered_for_hopper(lambda *a: pallas_triton.rope_write(*a, eps, finite), *arrays)
    assert "xla.gpu.triton" in text
    assert text.count("output_operand_alias") >= 2


def test_the_kernel_maps_over_a_batch_of_caches():
    cases = [operands(Shape(3, 2, 1, 32, 2, 4), seed)[:7] for seed in (1, 2)]
    call = interpreted(pallas_triton.FEW)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    mapped = jax.vmap(lambda *arrays: call(*arrays, None, None, EPS, False))(*stacked)
    for index, case in enumerate(cases):
        for batch, alone in zip(mapped, call(*case, None, None, EPS, False), strict=True):
            np.testing.assert_array_equal(batch[index], alone)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
@pytest.mark.parametrize("automatic", ["xla", "triton"])
def test_triton_without_a_gpu_raises_and_the_default_falls_back(monkeypatch, automatic):
    monkeypatch.setattr("pallas_kernels.rope_write.api.AUTOMATIC", automatic)
    *arrays, q_norm, k_norm, _, _ = operands(Shape(2, 1, 1, 32, 1, 4))
    with pytest.raises(NotImplementedError, match="wanted a Hopper GPU"):
        rope_write(*arrays, implementation="triton")
    for mine, theirs in zip(
        rope_write(*arrays),
        reference.rope_write(*arrays, q_norm, k_norm, 0.0, False),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_the_kernel_says_what_it_does_not_support():
    fused, _, _, keys, values, *_ = operands(Shape(1, 1, 1, 32, 1, 4))
    says = pallas_triton.unsupported(fused.astype(jnp.float32), keys, values)
    assert says == "the dtype of fused is float32, wanted bfloat16"
    wide = jnp.zeros((1, 1, 4, 96), jnp.bfloat16)
    assert "head width E is 96" in (pallas_triton.unsupported(fused, wide, wide) or "")


def test_shapes_that_disagree_are_refused():
    fused, cos, sin, keys, values, slot, position, *_ = operands(Shape(2, 1, 1, 32, 1, 4))
    with pytest.raises(ValueError, match=r"wanted H \+ 2\*1 heads of 32"):
        rope_write(fused[:, :32], cos, sin, keys, values, slot, position)
    with pytest.raises(ValueError, match="cos has shape"):
        rope_write(fused, cos[:1], sin, keys, values, slot, position)
    with pytest.raises(ValueError, match="position has shape"):
        rope_write(fused, cos, sin, keys, values, slot, position[:1])
    with pytest.raises(ValueError, match="wanted that of keys"):
        rope_write(fused, cos, sin, keys, values[:, :, :2], slot, position)
    with pytest.raises(ValueError, match="implementation is 'mosaic'"):
        rope_write(fused, cos, sin, keys, values, slot, position, implementation="mosaic")  # type: ignore

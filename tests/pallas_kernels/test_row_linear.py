"""Products of few rows: one suite over every implementation, and legality on Hopper."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_linear import (
    linear_add,
    pallas_triton,
    reference,
    rms_linear,
    tiled_triton,
)
from pallas_kernels.row_linear.pallas_triton import Tuning
from pallas_kernels.row_linear.shapes import SHAPES

EPS = 1e-5
ROUNDING = 1e-2


class Ops(NamedTuple):
    rms_linear: Callable
    linear_add: Callable


def interpreted(tuning):
    options = {"tuning": tuning, "interpret": True}
    return Ops(
        lambda x, norm, weight, gated: pallas_triton.rms_linear(
            x, norm, weight, EPS, gated, **options
        ),
        functools.partial(pallas_triton.linear_add, **options),
    )


@pytest.fixture(
    params=["xla", "triton, interpreted", pytest.param("triton", marks=pytest.mark.gpu)]
)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "triton, interpreted":
        return interpreted(pallas_triton.DEFAULT)
    chosen = {"implementation": request.param}
    return Ops(
        jax.jit(
            lambda x, norm, weight, gated: rms_linear(
                x, norm, weight, eps=EPS, gated=gated, **chosen
            ),
            static_argnums=3,
        ),
        jax.jit(functools.partial(linear_add, **chosen)),
    )


def draw(*sizes, seed=0, scale=1.0):
    random = np.random.default_rng([seed, *sizes])
    # rounded on the host, where no shape is a program to compile
    return jax.device_put((scale * random.standard_normal(sizes, np.float32)).astype(jnp.bfloat16))


def normed_case(rows, width, outputs):
    x, norm = draw(rows, width), 1 + draw(width, seed=1, scale=0.1)
    return x, norm, draw(outputs, width, seed=2, scale=width**-0.5)


def by_hand(x, norm, weight, gated):
    x, norm, weight = (np.asarray(a, np.float64) for a in (x, norm, weight))
    out = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm @ weight.T
    if gated:
        gate, up = np.split(out, 2, axis=-1)
        out = gate / (1 + np.exp(-gate)) * up
    return out


def relative_error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [64, 192, 576])
def test_rows_are_normed_multiplied_and_gated(ops, width, gated):
    case = normed_case(3, width, 32)
    got = ops.rms_linear(*case, gated)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, by_hand(*case, gated)) < ROUNDING


def test_the_residual_is_added(ops):
    x, weight, residual = draw(5, 192), draw(24, 192, seed=1, scale=0.1), draw(5, 24, seed=2)
    want = (
        np.asarray(residual, np.float64)
        + np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    )
    assert relative_error(ops.linear_add(x, weight, residual), want) < ROUNDING


@pytest.mark.parametrize("gated", [False, True])
def test_the_gradient_is_that_of_the_reference(ops, gated):
    x, norm, weight = normed_case(3, 64, 32)
    w2 = draw(64, 16 if gated else 32, seed=3, scale=0.1)
    wide = jnp.concatenate([w2] * (4 if gated else 2), axis=1)  # the kernel wants 64 numbers

    def total(normed, added, x, norm, weight):
        out = normed(x, norm, weight, gated)
        out = jnp.concatenate([out] * (4 if gated else 2), axis=1)
        return jnp.sum(jnp.sin(added(out, wide, x).astype(jnp.float32)))

    def plain(x, norm, weight, gated):
        return reference.rms_linear(x, norm, weight, EPS, gated)

    def gradient(normed, added):
        return jax.jit(jax.grad(functools.partial(total, normed, added), (0, 1, 2)))

    found = gradient(*ops)(x, norm, weight)
    wanted = gradient(plain, reference.linear_add)(x, norm, weight)
    for own, other in zip(found, wanted, strict=True):
        assert relative_error(own, np.asarray(other, np.float64)) < 2 * ROUNDING


def test_leading_axes_are_kept(ops):
    x, norm, weight = normed_case(6, 64, 16)
    shaped = ops.rms_linear(x.reshape(1, 2, 3, 64), norm, weight, False)
    assert shaped.shape == (1, 2, 3, 16)
    np.testing.assert_array_equal(shaped.reshape(6, 16), ops.rms_linear(x, norm, weight, False))


def test_a_broken_row_stays_alone(ops):
    x, norm, weight = normed_case(3, 64, 16)
    got = ops.rms_linear(x.at[1].set(jnp.nan), norm, weight, False)
    assert np.isnan(np.asarray(got[1], np.float32)).all()
    assert relative_error(got[::2], by_hand(x, norm, weight, False)[::2]) < ROUNDING


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(interpreted(pallas_triton.DEFAULT), id="interpreted"),
        pytest.param(
            Ops(
                lambda *case: pallas_triton.rms_linear(*case[:3], EPS, case[3]),
                pallas_triton.linear_add,
            ),
            id="triton",
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_in_the_kernel_a_row_does_not_depend_on_the_rows_beside_it(run):
    x, norm, weight = normed_case(16, 576, 32)
    residual = draw(16, 32, seed=5)
    together = run.rms_linear(x, norm, weight, True), run.linear_add(x, weight, residual)
    for rows in (1, 7, 8):
        part = x[3 : 3 + rows]
        alone = (
            run.rms_linear(part, norm, weight, True),
            run.linear_add(part, weight, residual[3 : 3 + rows]),
        )
        for some, every in zip(alone, together, strict=True):
            np.testing.assert_array_equal(some, every[3 : 3 + rows])


@pytest.mark.parametrize("tuning", [Tuning(16, 4, 4), Tuning(8, 2, 4)])
def test_how_a_program_is_cut_changes_rounding_alone(tuning):
    case = normed_case(4, 192, 32)
    assert relative_error(interpreted(tuning).rms_linear(*case, True), by_hand(*case, True)) < (
        ROUNDING
    )


TILED = [
    pytest.param(functools.partial(tiled_triton.linear_add, interpret=True), id="interpreted"),
    pytest.param(
        functools.partial(linear_add, implementation="triton"), id="triton", marks=pytest.mark.gpu
    ),
]


@pytest.mark.parametrize("run", TILED)
@pytest.mark.parametrize(("rows", "width"), [(17, 64), (100, 192), (200, 128)])
def test_tiles_of_rows_are_multiplied_and_added_each_row_by_itself(run, rows, width):
    x, weight = draw(rows, width), draw(32, width, seed=1, scale=width**-0.5)
    residual = draw(rows, 32, seed=2)
    want = (
        np.asarray(residual, np.float64)
        + np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    )
    got = run(x, weight, residual)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, want) < ROUNDING
    broken = run(x.at[3].set(jnp.nan), weight, residual)
    assert np.isnan(np.asarray(broken[3], np.float32)).all()
    np.testing.assert_array_equal(np.delete(broken, 3, 0), np.delete(got, 3, 0))


def test_the_gradient_of_tiles_is_that_of_the_reference():
    x, weight, residual = draw(20, 64), draw(16, 64, seed=1, scale=0.1), draw(20, 16, seed=2)

    def total(run, *operands):
        return jnp.sum(jnp.sin(run(*operands).astype(jnp.float32)))

    tiled = functools.partial(tiled_triton.linear_add, interpret=True)
    found, wanted = (
        jax.jit(jax.grad(functools.partial(total, run), (0, 1, 2)))(x, weight, residual)
        for run in (tiled, reference.linear_add)
    )
    for own, other in zip(found, wanted, strict=True):
        assert relative_error(own, np.asarray(other, np.float64)) < 2 * ROUNDING


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": jnp.float32}, "the dtype of x is float32"),
        ({"rows": 257}, "x has 257 rows, wanted 1 to 256"),
        ({"width": 96}, "rows of x hold 96 numbers"),
        ({"width": 4096}, "rows of x hold 4096 numbers"),
        ({"outputs": 24}, "weight has 24 rows, wanted a multiple of 16"),
        ({"outputs": 0}, "weight has 0 rows"),
    ],
)
def test_tiles_say_what_they_do_not_support(change, says):
    sizes = {"dtype": jnp.bfloat16, "rows": 20, "width": 64, "outputs": 32} | change
    x = jax.ShapeDtypeStruct((sizes["rows"], sizes["width"]), sizes["dtype"])
    weight = jax.ShapeDtypeStruct((sizes["outputs"], sizes["width"]), jnp.bfloat16)
    assert says in (tiled_triton.unsupported(x, weight) or "")


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_hopper(lowered_for_hopper, name):
    shape = SHAPES[name]
    x = jnp.zeros((shape.rows, shape.width), jnp.bfloat16)
    weight = jnp.zeros((shape.outputs, shape.width), jnp.bfloat16)
    gated = shape.kind == "gated"
    kernel = pallas_triton if shape.rows <= pallas_triton.ROWS else tiled_triton
    if shape.kind == "add":
        residual = jnp.zeros((shape.rows, shape.outputs), jnp.bfloat16)
        assert kernel.unsupported(x, weight) is None
        text = lowered_for_hopper(kernel.linear_add, x, weight, residual)
    else:
        assert pallas_triton.unsupported(x, weight, gated) is None
        text = lowered_for_hopper(
            lambda *case: pallas_triton.rms_linear(*case, EPS, gated), x, x[0], weight
        )
    assert len(re.findall("xla.gpu.triton", text)) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": jnp.float32}, "the dtype of x is float32"),
        ({"rows": 17}, "x has 17 rows, wanted 1 to 16"),
        ({"width": 96}, "rows of x hold 96 numbers"),
        ({"width": 4096}, "rows of x hold 4096 numbers"),
        ({"outputs": 24}, "weight has 24 rows, wanted a multiple of 16"),
    ],
)
def test_the_kernel_says_what_it_does_not_support(change, says):
    sizes = {"dtype": jnp.bfloat16, "rows": 2, "width": 64, "outputs": 32} | change
    x = jnp.zeros((sizes["rows"], sizes["width"]), sizes["dtype"])
    weight = jnp.zeros((sizes["outputs"], sizes["width"]), jnp.bfloat16)
    assert says in (pallas_triton.unsupported(x, weight, gated=True) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asserts what happens without a GPU")
@pytest.mark.parametrize("automatic", ["xla", "triton"])
def test_triton_without_a_gpu_raises_and_the_default_falls_back(monkeypatch, automatic):
    monkeypatch.setattr("pallas_kernels.row_linear.api.AUTOMATIC", automatic)
    x, norm, weight = normed_case(2, 64, 16)
    with pytest.raises(NotImplementedError, match="rms_linear cannot run"):
        rms_linear(x, norm, weight, eps=EPS, implementation="triton")
    np.testing.assert_array_equal(
        rms_linear(x, norm, weight, eps=EPS), reference.rms_linear(x, norm, weight, EPS, False)
    )


def test_shapes_that_disagree_are_refused():
    x, norm, weight = normed_case(2, 64, 15)
    with pytest.raises(ValueError, match="wanted two axes and 64 columns"):
        rms_linear(x, norm, weight[:, :32], eps=EPS)
    with pytest.raises(ValueError, match="norm has shape"):
        rms_linear(x, norm[:32], weight, eps=EPS)
    with pytest.raises(ValueError, match="wanted an even number"):
        rms_linear(x, norm, weight, eps=EPS, gated=True)
    with pytest.raises(ValueError, match="residual has shape"):
        linear_add(x, weight, x)
    with pytest.raises(ValueError, match="implementation is 'mosaic'"):
        rms_linear(x, norm, weight, eps=EPS, implementation="mosaic")  # type: ignore

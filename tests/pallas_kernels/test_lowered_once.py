"""Kernels that are lowered once a process."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.lowered_once import lowered_once


@pytest.fixture
def kernel():
    """``x + step``, and how often it has been written out."""
    written = []

    @lowered_once("step", "interpret")
    def added(x, y=None, *, step=1, interpret=False):
        written.append((x.shape, step))

        def body(x_ref, out_ref):
            out_ref[...] = x_ref[...] + step

        out = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
        )(x)
        return out if y is None else out * y

    return added, written


def numbers(count):
    return jax.ShapeDtypeStruct((count,), jnp.float32)


def test_programs_of_one_shape_share_a_lowering(kernel, lowered_for_hopper):
    added, written = kernel
    first = lowered_for_hopper(lambda x: added(x) * 2, numbers(16))
    second = lowered_for_hopper(lambda x: added(added(x) - 3), numbers(16))
    assert len(written) == 1
    assert all("@__gpu$xla.gpu.triton" in program for program in (first, second))


def test_other_shapes_and_static_arguments_have_lowerings_of_their_own(kernel, lowered_for_hopper):
    added, written = kernel
    for count, step in ((16, 1), (32, 1), (16, 2)):
        lowered_for_hopper(lambda x, step=step: added(x, step=step), numbers(count))
    lowered_for_hopper(added, numbers(16), numbers(16))
    assert written == [((16,), 1), ((32,), 1), ((16,), 2), ((16,), 1)]


def test_a_batch_goes_through_the_one_lowering_entry_by_entry(kernel, lowered_for_hopper):
    added, written = kernel
    shape = jax.ShapeDtypeStruct((3, 2, 16), jnp.float32)
    program = lowered_for_hopper(jax.vmap(jax.vmap(added)), shape)
    assert written == [((16,), 1)]
    assert program.count("stablehlo.while") == 2
    lowered_for_hopper(added, numbers(16))
    assert len(written) == 1


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1)])
def test_entries_of_a_batch_are_what_they_are_alone(kernel, axes):
    added = functools.partial(kernel[0], step=2, interpret=True)
    operands = [
        jnp.arange(4.0) if axis is None else jnp.arange(16.0).reshape(4, 4) for axis in axes
    ]
    mapped = jax.vmap(added, axes)(*operands)
    for entry in range(4):
        alone = [
            x if axis is None else jnp.take(x, entry, axis)
            for x, axis in zip(operands, axes, strict=True)
        ]
        assert mapped[entry].tolist() == added(*alone).tolist()


def test_what_is_interpreted_runs_here(kernel):
    added, _ = kernel
    x = jnp.arange(4.0)
    assert added(x, y=x, step=2, interpret=True).tolist() == [0.0, 3.0, 8.0, 15.0]

"""How programs are compiled: several beside each other, and with what options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

FEW_ROWS = 64
"""Up to so many rows XLA may write matrix products for a GPU itself.

It times its own kernels and cuBLAS's one by one, on weights that lie in the cache after the first
try, and picks what is slower in a model: so a verification of 96 or 128 rows by SmolLM2-135M takes
an H200 10-13 % longer, whole steps of 96 to 1024 rows 4-14 %. With few rows its own kernels save
passes over memory, 9-13 % of a drafter's walk. Each that it tries must be compiled, too.
"""

CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options with which matrix products come from cuBLAS alone; other backends look away."""


def jit_for_rows(function: Callable[..., Any], **how: Any) -> Callable[[int], Any]:
    """``jax.jit(function, **how)``, compiled as suits matrix products of so many rows.

    JAX refuses a program with options inside another: whoever traces ``function`` within a program
    of their own gives that one the options.
    """
    few = jax.jit(function, **how)
    many = jax.jit(function, compiler_options=CUBLAS, **how)
    return lambda rows: few if rows <= FEW_ROWS else many


def bound[T](state: T) -> T:
    """The same arrays, nothing copied, but bound to their device, as what programs return is.

    A program that holds a kernel which was lowered before it (``pallas_kernels.lowered_once``)
    binds its results to their device, where arrays usually follow whatever they meet. To JAX an
    operand that is bound is another operand: a program called first with a state that is not, and
    then with what it returned, is compiled twice, the second time in the midst of serving.

    Args:
        state: JAX arrays, or shapes of some, which belong to the default device unless they say
            where they are.

    Raises:
        AttributeError: something else among them, a NumPy array for one.
    """
    [device] = jnp.zeros(()).devices()

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=leaf.sharding or jax.sharding.SingleDeviceSharding(device))
        return jax.device_put(leaf, leaf.sharding)

    return jax.tree.map(one, state)


def compile_together(programs: Iterable[jax.stages.Lowered], progress: bool = False) -> None:
    """Compile all of these; calls with arguments of the same shapes then find them compiled.

    Tracing holds the interpreter, compiling does not: while one program is traced, the ones
    before it compile, one a processor.

    Args:
        programs: lowered one by one, as they are asked for.
        progress: show a bar.
    """
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        compiling = [workers.submit(program.compile) for program in programs]
        for one in track(compiling, "compiling", disable=not progress):
            one.result()

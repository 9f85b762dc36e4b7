"""Kernels lowered once a process, however many programs call them with operands of one shape.

Pallas writes a kernel out in Python, a Mosaic one in most of a second. JAX does so once a program,
and the programs of an engine differ in much that a kernel does not see.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh

_TARGETS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")

_EXPORTING = threading.RLock()
"""One at a time: what an export sets holds for the whole process."""


def lowered_once(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `jax.jit` with the static arguments ``static``, for a kernel that only CUDA runs.

    What is true in ``interpret`` is not lowered here, and so runs anywhere. The result has no
    gradient. Mapped by `jax.vmap` it runs for one entry of the batch after another. Of what
    surrounds a call, the kernel may look at the mesh alone: default precision, 64 bits and
    `choice.preferring` are those of the first call.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(kernel)

        @functools.partial(jax.jit, static_argnames=static)
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            fixed = {name: given.arguments[name] for name in static}
            operands = {name: value for name, value in given.arguments.items() if name not in fixed}

            # what has been lowered has its shapes for good
            @jax.custom_batching.sequential_vmap
            def run(operands: dict[str, Any]) -> Any:
                if fixed.get("interpret"):
                    return kernel(**operands, **fixed)
                leaves, tree = jax.tree.flatten(operands)
                shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
                mesh = jax.sharding.get_abstract_mesh()
                return _lowered(kernel, tree, shapes, tuple(fixed.items()), mesh).call(*leaves)

            return run(operands)

        return call

    return decorate


@functools.cache
def _lowered(
    kernel: Callable[..., Any],
    tree: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    fixed: tuple[tuple[str, Any], ...],
    mesh: AbstractMesh,
) -> export.Exported:
    """The kernel for operands of these shapes, within this mesh."""
    del mesh  # it is in the key because the lowered text names it

    @functools.wraps(kernel)
    def flat(*leaves: jax.Array) -> Any:
        return kernel(**jax.tree.unflatten(tree, leaves), **dict(fixed))

    del flat.__wrapped__  # its signature is not that of the kernel
    unstable = [export.DisabledSafetyCheck.custom_call(target) for target in _TARGETS]
    with _EXPORTING, _for_this_process():
        return export.export(jax.jit(flat), platforms=("cuda",), disabled_checks=unstable)(*shapes)


@contextlib.contextmanager
def _for_this_process() -> Iterator[None]:
    """An export that no older runtime must be able to read: the very kernel that jit makes."""
    flag = "jax_export_ignore_forward_compatibility"
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, before)

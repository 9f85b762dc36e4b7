"""Checks and times every implementation on a GPU.

Tokens must be as good as the best of logits in fp32, up to rounding, and logits theirs. Times are
those of dependent calls in one jitted program over matrices that together overflow the L2. Floors:
the products at 790 TFLOP/s, and the matrices read once at 4.3 TB/s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.best_linear import mosaic_gpu, reference
from pallas_kernels.best_linear.mosaic_gpu import Tuning
from pallas_kernels.best_linear.shapes import SHAPES, Shape

BYTES_PER_US = 4.3e6
FLOPS_PER_US = 790e6
MATRIX_BYTES = 120 * 2**20
TOLERANCE = 1e-3
TUNINGS = {
    "smollm2-135m draft 8192": (Tuning(128, 192, 5), Tuning(128, 128, 6), Tuning(128, 256, 3)),
    "smollm2-135m draft 512": (Tuning(128, 192, 5), Tuning(128, 128, 6)),
    "smollm2-135m draft 64": (Tuning(64, 128, 8), Tuning(64, 256, 5), Tuning(128, 192, 5)),
    "qwen3-4b draft 64": (Tuning(64, 128, 8), Tuning(64, 256, 5)),
}
"""Cuts tried beside the default."""

Call = Callable[..., tuple[jax.Array, jax.Array]]
Head = tuple[jax.Array, jax.Array | None]


@functools.cache
def heads(width: int, outputs: int, rank: int, seed: int) -> tuple[Head, ...]:
    """Random matrices, and those of a second product if there is one."""
    count = -(-MATRIX_BYTES // (2 * width * outputs))
    keys = jax.random.split(jax.random.key(seed), 2 * count)

    def draw(key: jax.Array, columns: int) -> jax.Array:
        sizes = outputs, columns
        return (columns**-0.5 * jax.random.normal(key, sizes)).astype(jnp.bfloat16)

    return tuple(
        (draw(one, width), draw(two, rank) if rank else None)
        for one, two in zip(keys[::2], keys[1::2], strict=True)
    )


def inputs(shape: Shape, seed: int) -> tuple[jax.Array, jax.Array | None]:
    """Random rows, and those of the second product if there is one."""
    keys = jax.random.split(jax.random.key(seed + 1))
    x, y = (
        jax.random.normal(key, (shape.rows, columns)).astype(jnp.bfloat16)
        for key, columns in zip(keys, (shape.width, shape.rank), strict=True)
    )
    return x, y if shape.rank else None


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every shape and implementation."""
    runs: dict[str, Call] = {"mosaic": mosaic_gpu.best_linear, "xla": reference.best_linear}
    for name, shape in SHAPES.items():
        cuts = {
            f"mosaic {one.rows}x{one.columns}x{one.stages}": functools.partial(
                mosaic_gpu.best_linear, tuning=one
            )
            for one in TUNINGS.get(name, ())
        }
        for variant, run in (runs | cuts).items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Call, seed: int) -> Row:
    (x, y), matrices = inputs(shape, seed), heads(shape.width, shape.outputs, shape.rank, seed)

    def best(x: jax.Array, y: Any, head: Head) -> tuple[jax.Array, jax.Array]:
        weight, second = head
        return run(x, weight, None if second is None else (y, second))

    def step(x: jax.Array, y: Any, matrices: tuple[Head, ...]) -> jax.Array:
        for head in matrices:
            _, logit = best(x, y, head)
            link = (logit[:1, None] * 1e-3).astype(x.dtype)
            x = jax.lax.dynamic_update_slice(x, link, (0, 0))
        return x

    error = float(_error(x, y, matrices[0], *jax.jit(best)(x, y, matrices[0])))
    numbers = (shape.width + shape.rank) * shape.outputs
    floors = {
        "products_us": 2 * shape.rows * numbers / FLOPS_PER_US,
        "memory_us": 2 * numbers / BYTES_PER_US,
    }
    floor = max(floors.values())
    repeats = max(2, min(100, int(2e4 / floor) // len(matrices)))
    us = microseconds(
        lambda x, *_: x,
        lambda x, _, *rest: step(x, *rest),
        x,
        y,
        matrices,
        calls=1,
        repeats=repeats,
    )
    return (
        dataclasses.asdict(shape)
        | floors
        | {
            "us": us / len(matrices),
            "error": error,
            "note": f"floor {floor:.1f} us, error {error:.1e}",
            # written so that NaN fails
            "failed": "" if error < TOLERANCE else f"error not below {TOLERANCE}",
        }
    )


@jax.jit
def _error(x: jax.Array, y: Any, head: Head, token: jax.Array, logit: jax.Array) -> jax.Array:
    """How far tokens are from the best of XLA's logits, and logits from theirs, at the most."""
    weight, second = head
    logits = reference.linear(x, weight, jnp.float32)
    if second is not None:
        logits += reference.linear(y, second, jnp.float32)
    own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return jnp.maximum(jnp.abs(logits.max(axis=1) - own).max(), jnp.abs(own - logit).max())


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))

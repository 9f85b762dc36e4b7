"""Checks and times every implementation on a GPU.

Scores are checked against the reference in fp32 where tokens see keys. Times are those of
dependent calls in one jitted program; the floor is the larger of the keys and scores at 4.3 TB/s
and the product at 790 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.indexer_logits import Batch, pallas_triton, reference
from pallas_kernels.indexer_logits.pallas_triton import Tuning
from pallas_kernels.indexer_logits.shapes import SHAPES, Shape

BYTES_PER_US = 4.3e6
OPERATIONS_PER_US = 790e6
TOLERANCE = 1e-5
TUNINGS = (Tuning(128, 4, 2), Tuning(128, 8, 3), Tuning(256, 8, 3), Tuning(256, 4, 2))
"""Cuts tried beside the default."""
TUNED = ("v4 64 x 4 of 128k", "v3.2 64 x 6 of 32k")
"""Shapes that they are tried on."""

Call = Callable[..., jax.Array]
Operands = tuple[jax.Array, jax.Array, jax.Array, Batch]


def operands(shape: Shape, seed: int) -> Operands:
    """Random operands; keys lie in shuffled pages, and each token sees one key more."""
    random = np.random.default_rng(seed)
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    tokens = shape.requests * shape.window
    columns = shape.entries // shape.page_size
    pages = shape.requests * columns
    size = (tokens, shape.heads, shape.width)
    first = shape.entries - shape.window - random.integers(0, 64, (shape.requests, 1))
    batch = Batch(
        row=jnp.arange(tokens, dtype=jnp.int32).reshape(shape.requests, shape.window),
        pages=jnp.asarray(random.permutation(pages).reshape(shape.requests, columns), jnp.int32),
        seen=jnp.asarray((first + np.arange(shape.window)).reshape(-1), jnp.int32),
    )
    return (
        jax.random.normal(one, size, jnp.bfloat16),
        jax.random.normal(two, size[:2]) * (shape.heads * shape.width) ** -0.5,
        jax.random.normal(three, (pages, shape.page_size, shape.width), jnp.bfloat16),
        batch,
    )


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every shape and implementation."""
    runs: dict[str, Call] = {
        "triton": pallas_triton.indexer_logits,
        "xla": reference.indexer_logits,
    }
    cuts: dict[str, Call] = {
        f"triton {one.keys}/{one.warps}/{one.stages}": functools.partial(
            pallas_triton.indexer_logits, tuning=one
        )
        for one in TUNINGS
    }
    for name, shape in SHAPES.items():
        for variant, run in (runs | (cuts if name in TUNED else {})).items():
            yield name, variant, functools.partial(_measure, shape, run, seed)


def _measure(shape: Shape, run: Call, seed: int) -> Row:
    case = operands(shape, seed)
    row: Row = dataclasses.asdict(shape) | {"error": _error(run, case)}

    def step(weight: jax.Array, query: jax.Array, keys: jax.Array, batch: Batch) -> jax.Array:
        scores = run(query, weight, keys, batch)
        return weight + 1e-9 * scores[:, :1]

    xla = run is reference.indexer_logits
    calls, repeats = (1, 3) if xla else (4, 4)
    query, weight, keys, batch = case
    us = microseconds(lambda *_: weight, step, query, keys, batch, calls=calls, repeats=repeats)
    pairs = shape.requests * shape.window * shape.entries
    moved = keys.size * 2 + pairs * 4
    work = 2 * pairs * shape.heads * shape.width
    floor = max(moved / BYTES_PER_US, work / OPERATIONS_PER_US)
    note = f"floor {floor:.1f} us, {work / us / 1e6:.0f} TFLOP/s, error {row['error']:.0e}"
    # written so that NaN fails
    failed = "" if row["error"] < TOLERANCE else f"error not below {TOLERANCE}"
    return row | {"us": us, "floor_us": floor, "note": note, "failed": failed}


def _error(run: Call, case: Operands) -> float:
    """Largest difference to fp32 scores of seen keys, over their deviation."""
    query, weight, keys, batch = case
    with jax.default_matmul_precision("highest"):
        wide = (query.astype(jnp.float32), weight, keys.astype(jnp.float32), batch)
        wanted = jax.jit(reference.indexer_logits)(*wide)
    seen = jnp.arange(wanted.shape[1]) < batch.seen[:, None]
    difference = jnp.where(seen, jnp.abs(jax.jit(run)(*case) - wanted), 0.0)
    return float(difference.max() / jnp.std(wanted))


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))

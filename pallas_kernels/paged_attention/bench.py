"""Checks and times every implementation on a GPU.

Numbers are checked against fp32 on fresh random operands whose unused cache rows hold NaN, and
timed inside one jitted program of dependent calls over caches that together overflow the L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import mosaic_gpu, reference
from pallas_kernels.paged_attention.mosaic_gpu import Tuning
from pallas_kernels.paged_attention.packing import apart, together
from pallas_kernels.paged_attention.shapes import SHAPES, SWEPT, Shape

CALLS = 30
REPEATS = 4
SAMPLES = 5
CACHE_BYTES = 256 * 2**20
TOLERANCE = 1e-2
Attend = Callable[..., jax.Array]


def implementations() -> dict[str, Attend]:
    """The implementations as callers get them, and packed queries with and without gathers."""
    return {
        "mosaic": mosaic_gpu.paged_attention,
        "mosaic, packed": functools.partial(_packed, by_kernel=True),
        "mosaic, gathered": functools.partial(_packed, by_kernel=False),
        "xla": jax.jit(reference.paged_attention),
    }


@functools.partial(jax.jit, static_argnames="by_kernel")
def _packed(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    slots: jax.Array | None,
    *,
    by_kernel: bool,
) -> jax.Array:
    """Queries found through places that the compiler does not know."""
    first = jnp.minimum(position.max(), 0)
    rows = first + jnp.arange(position.size, dtype=jnp.int32).reshape(position.shape)
    packed = query.reshape(-1, *query.shape[2:])
    if by_kernel:
        out = mosaic_gpu.paged_attention(packed, keys, values, position, slots, rows=rows)
    else:
        out = mosaic_gpu.paged_attention(apart(packed, rows), keys, values, position, slots)
        out = together(out, rows, len(packed))
    return out.reshape(query.shape)


def tunings(shape: Shape) -> dict[str, Attend]:
    """Other ways to run the Mosaic kernel at ``shape``: splits if it is small, else tiles."""
    blocks = shape.requests * shape.kv_heads
    if mosaic_gpu.split_count(blocks, shape.capacity, mosaic_gpu.DEFAULT.tile) > 1:
        options = {f"mosaic /{splits}": Tuning(splits=splits) for splits in (1, 4, 16)}
    else:
        options = {
            f"mosaic {tile}x{stages}": Tuning(tile, stages)
            for tile, stages in ((64, 2), (64, 4), (128, 2))
        }
    return {
        name: functools.partial(mosaic_gpu.paged_attention, tuning=tuning)
        for name, tuning in options.items()
    }


def operands(shape: Shape, seed: int, layers: int) -> tuple[jax.Array, list, jax.Array]:
    """Random query, ``layers`` pairs of caches with NaN past each length, and positions."""
    rng = np.random.default_rng(seed)
    low, high = shape.context // 2, min(shape.context * 3 // 2, shape.capacity)
    length = rng.integers(max(low, shape.width), high + 1, shape.requests)
    if shape.requests == 1:
        length[:] = shape.context
    position = length[:, None] - shape.width + np.arange(shape.width)
    live = (jnp.arange(shape.capacity) < jnp.asarray(length)[:, None])[:, None, :, None]

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        rows = (shape.requests, shape.kv_heads, shape.capacity, shape.head_dim)
        return jnp.where(live, jax.random.normal(key, rows, jnp.bfloat16), jnp.nan)

    keys = jax.random.split(jax.random.key(seed), 2 * layers + 1)
    caches = [(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(layers)]
    rows = (shape.requests, shape.width, shape.heads, shape.head_dim)
    # Scores of about unit variance times two: some keys matter more than others.
    query = 2 * jax.random.normal(keys[-1], rows, jnp.bfloat16)
    return query, caches, jnp.asarray(position, jnp.int32)


@jax.jit
def wide(
    query: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array, slots: jax.Array
) -> jax.Array:
    """The operation in fp32 throughout."""
    with jax.default_matmul_precision("highest"):
        query, keys, values = (x.astype(jnp.float32) for x in (query, keys, values))
        return reference.paged_attention(query, keys, values, position, slots)


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN counts."""
    difference = jnp.linalg.norm(got.astype(jnp.float32).ravel() - want.ravel())
    return float(difference / jnp.linalg.norm(want.ravel()))


def check(attend: Attend, case: tuple[Any, ...]) -> dict[str, Any]:
    """Errors with requests in slot order and with permuted slots, padding, and repeatability."""
    query, (keys, values), position, shuffled, slots, want, want_shuffled = case
    plain = attend(query, keys, values, position, None)
    again = attend(query, keys, values, position, None)
    moved = attend(query, keys, values, shuffled, slots)
    padding = moved[shuffled < 0]
    return {
        "error": relative_error(plain, want),
        "error_slots": relative_error(moved, want_shuffled) if moved.shape[0] > 1 else 0.0,
        "padding_is_zero": bool((padding == 0).all()),
        "repeats_bitwise": bool((plain == again).all()),
    }


def microseconds(attend: Attend, query: jax.Array, caches: list, position: jax.Array) -> float:
    """Median time of a call among ``CALLS`` dependent ones, ``REPEATS`` times in one program."""

    @jax.jit
    def program(query: jax.Array, caches: list, position: jax.Array) -> jax.Array:
        def layers(_: int, query: jax.Array) -> jax.Array:
            for call in range(CALLS):
                query = attend(query, *caches[call % len(caches)], position, None)
            return query

        return jax.lax.fori_loop(0, REPEATS, layers, query)

    program(query, caches, position).block_until_ready()
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        program(query, caches, position).block_until_ready()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) / (CALLS * REPEATS) * 1e6


def prepare(shape: Shape, seed: int) -> tuple[tuple[Any, ...], list, float]:
    """Operands and expected results of ``check``, the caches to time on, and their live bytes."""
    one = 4 * shape.requests * shape.kv_heads * shape.capacity * shape.head_dim
    layers = min(CALLS, max(2, -(-CACHE_BYTES // one)))
    query, caches, position = operands(shape, seed, layers)
    keys, values = caches[0]

    rng = np.random.default_rng(seed)
    slots = rng.permutation(shape.requests).astype(np.int32)
    shuffled = np.asarray(position)[slots]
    if shape.requests > 1:
        slots[0], shuffled[0] = shape.requests, -1  # a padding request
        shuffled[1, -1] = -1  # a padding row, or the whole request where W is 1
    slots, shuffled = jnp.asarray(slots), jnp.asarray(shuffled)
    case = (
        *(query, (keys, values), position, shuffled, slots),
        wide(query, keys, values, position, jnp.arange(shape.requests)),
        wide(query, keys, values, shuffled, slots),
    )
    live = float((position.max(axis=1) + 1).sum()) * shape.kv_heads * shape.head_dim * 4
    return case, caches, live


def brief(error: Exception) -> str:
    """The first lines of an error, short enough for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def main() -> int:
    """Prints a row per shape and implementation; 1 if any of them failed or erred."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--seconds", type=float, default=55.0, help="start nothing after these")
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    options = parser.parse_args()

    began = time.perf_counter()
    device = jax.devices()[0].device_kind
    report: dict[str, Any] = {"device": device, "jax": jax.__version__, "seed": options.seed}
    rows: list[dict[str, Any]] = []
    print(f"{device}, jax {jax.__version__}, seed {options.seed}")
    print(f"{'shape':30}{'implementation':20}{'us':>9}{'GB/s':>7}{'error':>10}{'slots':>10}")

    # Every shape as callers meet it first; other tunings with the time that is left.
    plan = [(name, shape, implementations()) for name, shape in SHAPES.items()]
    plan += [(name, SHAPES[name], tunings(SHAPES[name])) for name in SWEPT]
    for name, shape, runs in plan:
        if options.only not in name:
            continue
        try:
            case, caches, live = prepare(shape, options.seed)
        except Exception as error:  # one shape must not cost the others their numbers
            rows.append({"shape": name, "failed": brief(error)})
            print(f"{name:30}{brief(error)}", flush=True)
            continue
        for variant, attend in runs.items():
            row: dict[str, Any] = {"shape": name, "implementation": variant}
            if time.perf_counter() - began > options.seconds:
                row["skipped"] = "out of time"
                rows.append(row)
                continue
            try:
                row |= check(attend, case)
                row["us"] = microseconds(attend, case[0], caches, case[2])
                row["gb_per_s"] = live / row["us"] / 1e3
                row["failed"] = _verdict(row)
            except Exception as error:  # as above
                row["failed"] = brief(error)
            rows.append(row)
            print(_line(row), flush=True)
        del case, caches
        report["rows"] = rows
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))

    skipped = sum("skipped" in row for row in rows)
    failed = sum(bool(row.get("failed")) for row in rows)
    print(
        f"{len(rows)} rows, {failed} failed, {skipped} skipped, {time.perf_counter() - began:.0f} s"
    )
    return int(failed > 0 or len(rows) == skipped)


def _verdict(row: dict[str, Any]) -> str:
    # Written so that NaN fails.
    if not (row["error"] < TOLERANCE and row["error_slots"] < TOLERANCE):
        return f"relative error not below {TOLERANCE}"
    if not row["padding_is_zero"]:
        return "padding rows are not zero"
    if not row["repeats_bitwise"]:
        return "two runs differ"
    return ""


def _line(row: dict[str, Any]) -> str:
    line = f"{row['shape']:30}{row['implementation']:20}"
    if "us" in row:
        line += (
            f"{row['us']:9.1f}{row['gb_per_s']:7.0f}{row['error']:10.1e}{row['error_slots']:10.1e}"
        )
    return f"{line}  {row['failed']}".rstrip()


if __name__ == "__main__":
    raise SystemExit(main())

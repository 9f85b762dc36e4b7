"""Checks and times every implementation on a GPU.

Numbers are checked against fp32 on fresh random operands with rows that must write nothing, and
timed inside one jitted program of dependent calls that hand the caches on; the program's text is
searched for copies of a cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rope_write import pallas_triton, reference
from pallas_kernels.rope_write.pallas_triton import Tuning
from pallas_kernels.rope_write.shapes import SHAPES, Shape

CALLS = 10
REPEATS = 20
SAMPLES = 5
TOLERANCE = 1e-2
EPS = 1e-5
TUNINGS = (pallas_triton.FEW, pallas_triton.MANY, Tuning(rows=32, warps=4))
"""Ways of dealing rows tried beside the default."""

_STATIC = {"eps": EPS, "finite": True}


def implementations() -> dict[str, Callable]:
    """The implementations as callers get them, then other ways to deal the rows."""
    runs: dict[str, Callable] = {"xla": reference.rope_write, "triton": pallas_triton.rope_write}
    for tuning in TUNINGS:
        name = f"triton {tuning.rows}/{tuning.warps}"
        runs[name] = functools.partial(pallas_triton.rope_write, tuning=tuning)
    return {name: functools.partial(run, **_STATIC) for name, run in runs.items()}


def operands(shape: Shape, seed: int) -> list[Any]:
    """Random operands; every row has a place of its own, four of them outside the cache."""
    random = np.random.default_rng(seed)
    keys = iter(jax.random.split(jax.random.key(seed), 5))

    def draw(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes, jnp.bfloat16)

    place = random.permutation(shape.slots * shape.capacity)[: shape.rows]
    slot, position = place // shape.capacity, place % shape.capacity
    if shape.rows > 4:
        slot[:2] = -1, shape.slots
        position[2:4] = -1, shape.capacity
    angle = jnp.asarray(random.uniform(0, 6, (shape.rows, shape.head_dim // 2)), jnp.float32)
    cache = (shape.slots, shape.kv_heads, shape.capacity, shape.head_dim)
    return [
        draw(shape.rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        *(jnp.cos(angle), jnp.sin(angle)),
        *(draw(*cache), draw(*cache)),
        *(jnp.asarray(index, jnp.int32) for index in (slot, position)),
        *(draw(shape.head_dim) if shape.normed else None for _ in range(2)),
    ]


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN counts."""
    difference = jnp.linalg.norm(got.astype(jnp.float32).ravel() - want.ravel())
    return float(difference / jnp.linalg.norm(want.ravel()))


def check(run: Callable, case: list[Any]) -> float:
    """The largest error of query and caches against fp32."""

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32) if x is not None and x.dtype == jnp.bfloat16 else x

    want = jax.jit(functools.partial(reference.rope_write, **_STATIC))(*map(wide, case))
    got = jax.jit(run)(*case)
    return max(relative_error(*pair) for pair in zip(got, want, strict=True) if pair[0].size)


def time_calls(run: Callable, case: list[Any]) -> dict[str, Any]:
    """Median microseconds of a dependent call, and copies of a cache in the compiled program."""

    @functools.partial(jax.jit, donate_argnums=(3, 4))
    def program(fused, cos, sin, keys, values, *rest):
        def layers(_, carry):
            fused, keys, values = carry
            for _ in range(CALLS):
                query, keys, values = run(fused, cos, sin, keys, values, *rest)
                link = query.reshape(len(fused), -1)[:, :1] if query.size else keys[0, 0, :1, :1]
                link = jnp.broadcast_to(link, (len(fused), 1))
                fused = jax.lax.dynamic_update_slice(fused, link, (0, 0))
            return fused, keys, values

        return jax.lax.fori_loop(0, REPEATS, layers, (fused, keys, values))

    compiled = program.lower(*case).compile()
    cache = ",".join(map(str, case[3].shape))
    copies = re.findall(rf"= \(?bf16\[{cache}\]\S* (?:copy|copy-start)\(", compiled.as_text() or "")
    # the caller's caches are given away below
    case = [*case[:3], case[3].copy(), case[4].copy(), *case[5:]]
    fused, keys, values = jax.block_until_ready(compiled(*case))
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        fused, keys, values = compiled(fused, *case[1:3], keys, values, *case[5:])
        jax.block_until_ready(values)
        samples.append(time.perf_counter() - begin)
    us = statistics.median(samples) / (CALLS * REPEATS) * 1e6
    return {"us": us, "cache_copies": len(copies)}


def main() -> int:
    """Prints a row per shape and implementation; 1 if any of them failed or erred."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    options = parser.parse_args()

    device = jax.devices()[0].device_kind
    report: dict[str, Any] = {"device": device, "jax": jax.__version__, "seed": options.seed}
    rows: list[dict[str, Any]] = []
    print(f"{device}, jax {jax.__version__}, seed {options.seed}")
    for name, shape in SHAPES.items():
        if options.only not in name:
            continue
        case = operands(shape, options.seed)
        for variant, run in implementations().items():
            row: dict[str, Any] = {"shape": name, "implementation": variant}
            row |= dataclasses.asdict(shape)
            try:
                row["error"] = check(run, case)
                row |= time_calls(run, case)
                # Written so that NaN fails.
                row["failed"] = "" if row["error"] < TOLERANCE else "relative error too large"
                if row["cache_copies"]:
                    row["failed"] = "a cache is copied"
            except Exception as error:  # one variant must not cost the others their numbers
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
            rows.append(row)
            figures = f"{row['us']:9.2f} us{row['error']:10.1e}" if "us" in row else ""
            print(f"{name:30}{variant:16}{figures}  {row['failed']}".rstrip(), flush=True)
        report["rows"] = rows
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    return int(not rows or any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

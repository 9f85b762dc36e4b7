"""Checks and times every implementation on a GPU.

Numbers are checked against fp32 on fresh random operands, and timed inside one jitted program of
dependent calls over matrices that together overflow the L2, as the layers of a decoder do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.row_linear import pallas_triton, reference, tiled_triton
from pallas_kernels.row_linear.pallas_triton import Tuning
from pallas_kernels.row_linear.shapes import SHAPES, Shape

REPEATS = 20
SAMPLES = 5
MATRIX_BYTES = 120 * 2**20
MOST_MATRICES = 40
TOLERANCE = 1e-2
EPS = 1e-5
TUNINGS = (Tuning(16, 4, 4), Tuning(8, 8, 8), Tuning(8, 4, 8))
"""Cuts tried beside the default."""

Call = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def call(shape: Shape, module: Any, **options: Any) -> Call:
    """The operation of ``shape`` as a function of input, matrix and norm or residual."""
    if shape.kind == "add":
        return functools.partial(module.linear_add, **options)

    def normed(x: jax.Array, weight: jax.Array, norm: jax.Array) -> jax.Array:
        return module.rms_linear(x, norm, weight, EPS, shape.kind == "gated", **options)

    return normed


def implementations(shape: Shape) -> dict[str, Call]:
    """The implementations as callers get them, then other cuts of the kernel."""
    kernel = pallas_triton if shape.rows <= pallas_triton.ROWS else tiled_triton
    runs = {"xla": call(shape, reference), "triton": call(shape, kernel)}
    x = jax.ShapeDtypeStruct((shape.rows, shape.width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((shape.outputs, shape.width), jnp.bfloat16)
    for tuning in TUNINGS if shape.rows == 8 else ():
        if pallas_triton.unsupported(x, weight, shape.kind == "gated", tuning) is None:
            name = f"triton {tuning.outputs}/{tuning.slices}/{tuning.warps}"
            runs[name] = call(shape, pallas_triton, tuning=tuning)
    return runs


def operands(
    shape: Shape, seed: int, matrices: int
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Random input, matrices, and norm or residual."""
    keys = jax.random.split(jax.random.key(seed), matrices + 2)

    def draw(key: jax.Array, sizes: tuple[int, ...], scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(key, sizes)).astype(jnp.bfloat16)

    x = draw(keys[0], (shape.rows, shape.width))
    if shape.kind == "add":
        extra = draw(keys[1], (shape.rows, shape.outputs))
    else:
        extra = 1 + draw(keys[1], (shape.width,), 0.1)
    size = (shape.outputs, shape.width)
    return x, [draw(key, size, shape.width**-0.5) for key in keys[2:]], extra


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN counts."""
    difference = jnp.linalg.norm(got.astype(jnp.float32).ravel() - want.ravel())
    return float(difference / jnp.linalg.norm(want.ravel()))


def check(shape: Shape, run: Call, seed: int) -> dict[str, Any]:
    """Error against fp32, repeatability, and whether the first row alone gives the same bits."""
    x, (weight,), extra = operands(shape, seed, 1)
    run = jax.jit(run)
    got = run(x, weight, extra)
    with jax.default_matmul_precision("highest"):
        wide = (operand.astype(jnp.float32) for operand in (x, weight, extra))
        want = call(shape, reference)(*wide)
    alone = run(x[:1], weight, extra[:1] if shape.kind == "add" else extra)
    return {
        "error": relative_error(got, want),
        "repeats_bitwise": bool((got == run(x, weight, extra)).all()),
        "row_alone_bitwise": bool((alone[0] == got[0]).all()),
    }


def microseconds(shape: Shape, run: Call, seed: int) -> float:
    """Median time of a dependent call; the small update that links two calls is timed too."""
    one = 2 * shape.outputs * shape.width
    x, matrices, extra = operands(shape, seed, min(MOST_MATRICES, -(-MATRIX_BYTES // one)))

    @jax.jit
    def program(x: jax.Array, matrices: list[jax.Array], extra: jax.Array) -> jax.Array:
        def layers(_: int, x: jax.Array) -> jax.Array:
            for weight in matrices:
                out = run(x, weight, extra)
                x = jax.lax.dynamic_update_slice(x, out[:, :1] * jnp.bfloat16(1e-3), (0, 0))
            return x

        return jax.lax.fori_loop(0, REPEATS, layers, x)

    program(x, matrices, extra).block_until_ready()
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        program(x, matrices, extra).block_until_ready()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) / (REPEATS * len(matrices)) * 1e6


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
        for variant, run in implementations(shape).items():
            row: dict[str, Any] = {"shape": name, "implementation": variant}
            row |= dataclasses.asdict(shape)
            try:
                row |= check(shape, run, options.seed)
                row["us"] = microseconds(shape, run, options.seed)
                row["failed"] = _verdict(row)
            except Exception as error:  # one variant must not cost the others their numbers
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
            rows.append(row)
            figures = f"{row['us']:9.2f} us{row['error']:10.1e}" if "us" in row else ""
            print(f"{name:30}{variant:16}{figures}  {row['failed']}".rstrip(), flush=True)
        report["rows"] = rows
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    return int(not rows or any(row["failed"] for row in rows))


def _verdict(row: dict[str, Any]) -> str:
    # Written so that NaN fails.
    if not row["error"] < TOLERANCE:
        return f"relative error not below {TOLERANCE}"
    if not row["repeats_bitwise"]:
        return "two runs differ"
    if row["implementation"] != "xla" and not row["row_alone_bitwise"]:
        return "a row depends on the rows beside it"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())

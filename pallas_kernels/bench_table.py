"""A benchmark's main program: rows that fail alone, and times of dependent calls."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

Row = dict[str, Any]
"""A measurement; ``us`` is its time, ``failed`` why it does not count or an empty string."""

CALLS = 16
REPEATS = 8
SAMPLES = 5


def microseconds(
    begin: Callable[..., Any],
    step: Callable[..., Any],
    *operands: Any,
    calls: int = CALLS,
    repeats: int = REPEATS,
) -> float:
    """Median time of a ``step`` whose result the next one takes, inside one jitted loop.

    Args:
        begin: from the operands, the first carry.
        step: from carry and operands, the next carry.
        operands: arrays or trees of them.
        calls: steps of an iteration, so that the loop's own cost does not count for much.
        repeats: iterations.
    """

    @jax.jit
    def program(*operands: Any) -> Any:
        def unrolled(_: int, carry: Any) -> Any:
            for _ in range(calls):
                carry = step(carry, *operands)
            return carry

        return jax.lax.fori_loop(0, repeats, unrolled, begin(*operands))

    jax.block_until_ready(program(*operands))
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) / (calls * repeats) * 1e6


def main_of(
    description: str | None,
    measurements: Callable[[int], Iterable[tuple[str, str, Callable[[], Row]]]],
) -> int:
    """Print a row for every shape and implementation; 1 if any of them failed or erred.

    Args:
        description: of the program.
        measurements: from a seed, shape, implementation, and what measures it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    parser.add_argument("--implementation", default="", help="implementations that hold this")
    parser.add_argument("--seconds", type=float, default=100.0, help="start nothing after these")
    options = parser.parse_args()

    device = jax.devices()[0].device_kind
    report: Row = {"device": device, "jax": jax.__version__, "seed": options.seed}
    rows: list[Row] = []
    print(f"{device}, jax {jax.__version__}, seed {options.seed}")
    begin = time.perf_counter()
    for shape, implementation, measure in measurements(options.seed):
        if options.only not in shape or options.implementation not in implementation:
            continue
        row: Row = {"shape": shape, "implementation": implementation}
        if time.perf_counter() - begin > options.seconds:
            row["failed"] = "not started: out of time"
        else:
            try:
                row |= measure()
            except Exception as error:  # one variant must not cost the others their numbers
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
        rows.append(row)
        figures = f"{row['us']:10.2f} us" if "us" in row else ""
        notes = "".join(f"  {row[key]}" for key in ("note", "failed") if row.get(key))
        print(f"{shape:34}{implementation:22}{figures}{notes}".rstrip(), flush=True)
        report["rows"] = rows
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    return int(not rows or any(row["failed"] for row in rows))

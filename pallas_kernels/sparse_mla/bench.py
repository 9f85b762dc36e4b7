"""Checks and times every implementation on a GPU, beside FlashMLA where that is at hand.

Numbers are checked against fp32 on fresh random operands whose unlisted rows hold NaN. Ours is
timed inside one jitted program of dependent calls, theirs as replays of one CUDA graph of as
many calls, over pools that overflow the L2, in the same process.

FlashMLA is no dependency: ``--flashmla`` names the library ``_flashmla_C.abi3.so`` out of a vLLM
wheel. Its bf16 kernel takes one list, so two lists are joined for it; its fp8 kernel reads
caches of half the size.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_mla import mosaic_gpu, reference
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.shapes import SHAPES, Shape

CALLS = 10
SAMPLES = 7
MILLISECONDS = 12
"""Least length of a timed program."""
CHECKED_TOKENS = 8
TOLERANCE = 5e-3
PAGE = 64
PAGES = 1024
"""Of each pool: 75 MB at 576 bf16 numbers a row, more than the L2 holds."""

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12
"""What copies and bf16 products reached on an H200, for the floors."""

Operands = tuple[jax.Array, tuple[Selection, ...], jax.Array]
Attend = Callable[..., tuple[jax.Array, jax.Array]]


def implementations(shape: Shape, sm_scale: float) -> dict[str, Attend]:
    """The kernel as callers get it, other splits of the keys where it splits them, and XLA."""
    run = functools.partial(mosaic_gpu.sparse_mla, sm_scale=sm_scale)
    blocks = shape.tokens * shape.heads // mosaic_gpu.HEADS
    tiles = -(-shape.keys // 64) + -(-shape.extra // 64)
    splits = mosaic_gpu.split_count(blocks, tiles)
    found: dict[str, Attend] = {"mosaic": run}
    for other in {1, splits // 2} - {0, splits}:
        found[f"mosaic /{other}"] = functools.partial(run, splits=other)
    if shape.tokens <= 64:
        found["xla"] = functools.partial(
            reference.sparse_mla, sm_scale=sm_scale, value_width=mosaic_gpu.VALUE_WIDTH
        )
    return found


def operands(shape: Shape, seed: int) -> Operands:
    """Random queries, pools and full lists of random rows; NaN in the rows that nobody lists."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    selections = []
    for entries in filter(None, (shape.keys, shape.extra)):
        ids = jax.random.randint(next(keys), (shape.tokens, entries), 0, PAGES * PAGE)
        listed = jnp.zeros(PAGES * PAGE, bool).at[ids].set(True)
        pool = jax.random.normal(next(keys), (PAGES * PAGE, shape.width), jnp.bfloat16)
        pool = jnp.where(listed[:, None], pool, jnp.nan)
        selections.append(Selection(pool.reshape(PAGES, PAGE, -1), ids))
    rows = (shape.tokens, shape.heads, shape.width)
    # Scores of variance 4: some keys matter more than others.
    query = 2 * jax.random.normal(next(keys), rows, jnp.bfloat16)
    return query, tuple(selections), jax.random.normal(next(keys), (shape.heads,))


@functools.partial(jax.jit, static_argnames="sm_scale")
def wide(query: jax.Array, selections: Any, sinks: jax.Array, sm_scale: float) -> Any:
    """The operation in fp32 throughout."""
    query, selections = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (query, selections)
    )
    with jax.default_matmul_precision("highest"):
        return reference.sparse_mla(query, selections, sinks, sm_scale, mosaic_gpu.VALUE_WIDTH)


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN counts."""
    difference = jnp.linalg.norm(got.astype(jnp.float32).ravel() - want.ravel())
    return float(difference / jnp.linalg.norm(want.ravel()))


def check(attend: Attend, case: Operands, sm_scale: float) -> dict[str, Any]:
    """Errors of the last tokens' results and whether two runs agree to the bit."""
    query, selections, sinks = case
    attend = jax.jit(attend)
    out, lse = attend(query, selections, sinks)
    again, _ = attend(query, selections, sinks)
    last = slice(-CHECKED_TOKENS, None)
    few = tuple(Selection(s.pool, s.indices[last]) for s in selections)
    want, want_lse = wide(query[last], few, sinks, sm_scale)
    return {
        "error": relative_error(out[last], want),
        "lse_error": float(jnp.abs(lse[last] - want_lse).max()),
        "repeats_bitwise": bool((out == again).all()),
    }


def microseconds(attend: Attend, case: Operands, estimate: float) -> float:
    """Median time of a call among dependent ones, lists prepared anew in each."""
    repeats = max(2, round(MILLISECONDS * 1e3 / estimate / CALLS))

    @jax.jit
    def program(query: jax.Array, selections: Any, sinks: jax.Array) -> Any:
        def calls(_: int, carry: Any) -> Any:
            for _ in range(CALLS):
                shift = (carry[0] > 1e30).astype(jnp.int32)  # never: scores are small
                moved = tuple(Selection(s.pool, s.indices + shift) for s in selections)
                out, lse = attend(query, moved, sinks)
                carry = lse[0, 0], out
            return carry

        first = jnp.zeros((*query.shape[:2], mosaic_gpu.VALUE_WIDTH), query.dtype)
        return jax.lax.fori_loop(0, repeats, calls, (jnp.float32(0), first))[0]

    program(*case).block_until_ready()
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        program(*case).block_until_ready()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) / (CALLS * repeats) * 1e6


def floors(shape: Shape) -> dict[str, float]:
    """Operations, bytes if every listed row is read once a token, and the µs that each takes."""
    keys = shape.keys + shape.extra
    flops = 2 * shape.tokens * shape.heads * keys * (shape.width + mosaic_gpu.VALUE_WIDTH)
    rows = shape.tokens * keys * (2 * shape.width + 4)
    ends = 2 * shape.tokens * shape.heads * (shape.width + mosaic_gpu.VALUE_WIDTH)
    return {
        "flops": flops,
        "product_us": flops / FLOPS_PER_SECOND * 1e6,
        "memory_us": (rows + ends) / BYTES_PER_SECOND * 1e6,
    }


class FlashMLA:
    """The peer's kernels on PyTorch operands of the same shapes, timed by graph replay."""

    def __init__(self, library: Path) -> None:
        import torch

        self.torch = torch
        torch.ops.load_library(str(library))
        self.ops = torch.ops._flashmla_C

    def runs(self, shape: Shape, sm_scale: float) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and a call of each kernel that takes the shape."""
        torch, device = self.torch, "cuda"
        query = 2 * torch.randn(shape.tokens, shape.heads, shape.width, device=device)
        query = query.bfloat16()
        keys = shape.keys + shape.extra
        rows = PAGES * PAGE

        def listed(entries: int, count: int) -> Any:
            return torch.randint(count, (shape.tokens, 1, entries), device=device).int()

        if keys % 128 == 0:
            pools = 2 if shape.extra else 1
            kv = torch.randn(pools * rows, 1, shape.width, device=device).bfloat16()
            ids = listed(keys, pools * rows)
            yield (
                "flashmla bf16",
                lambda: self.ops.sparse_prefill_fwd(
                    query, kv, ids, sm_scale, 512, None, None, None
                ),
            )
        width = {576: 656, 512: 584}[shape.width]

        def cache() -> Any:
            # Bytes below 0x40 are finite e4m3 numbers, small scales and small bf16 numbers.
            return torch.randint(64, (PAGES, PAGE, 1, width), device=device).to(torch.uint8)

        rows_of_one = query[:, None]
        first = cache(), listed(shape.keys, rows)
        extra = (cache(), listed(shape.extra, rows), None) if shape.extra else (None, None, None)
        plan: list[Any] = [None, None]

        def decode() -> Any:
            out, _, *made = self.ops.sparse_decode_fwd(
                *(rows_of_one, *first, None, None, *plan, *extra),
                *(mosaic_gpu.VALUE_WIDTH, sm_scale, None),
            )
            plan[:] = made
            return out

        yield "flashmla fp8", decode

    def microseconds(self, call: Callable[[], Any]) -> float:
        """Median time of a call among those of one graph."""
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        repeats = max(2, round(MILLISECONDS / begin.elapsed_time(end)))
        samples = []
        for _ in range(SAMPLES):
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(begin.elapsed_time(end) / (CALLS * repeats) * 1e3)
        return statistics.median(samples)


def measure(name: str, seed: int, peer: FlashMLA | None) -> Iterator[dict[str, Any]]:
    """A row for each implementation at the shape; a failure is a row too."""
    shape = SHAPES[name]
    sm_scale = shape.width**-0.5
    limits = floors(shape)
    case = operands(shape, seed)
    for variant, attend in implementations(shape, sm_scale).items():
        row: dict[str, Any] = {"shape": name, "implementation": variant}
        try:
            row |= check(attend, case, sm_scale)
            estimate = 50 + 2 * limits["product_us"]
            row["us"] = microseconds(attend, case, estimate)
            row["failed"] = _verdict(row)
        except Exception as error:  # one variant must not cost the others their numbers
            row["failed"] = brief(error)
        yield row | limits
    for variant, call in peer.runs(shape, sm_scale) if peer else ():
        row = {"shape": name, "implementation": variant}
        try:
            row["us"] = peer.microseconds(call) if peer else None
            row["failed"] = ""
        except Exception as error:  # as above
            row["failed"] = brief(error)
        yield row | limits


def brief(error: Exception) -> str:
    """The first lines of an error, short enough for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def main() -> int:
    """Prints a row per shape and implementation; 1 if any of them failed or erred."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--flashmla", type=Path, help="_flashmla_C.abi3.so, to measure against")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--seconds", type=float, default=120.0, help="start no shape after these")
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    options = parser.parse_args()

    began = time.perf_counter()
    device = jax.devices()[0].device_kind
    report: dict[str, Any] = {"device": device, "jax": jax.__version__, "seed": options.seed}
    peer = FlashMLA(options.flashmla) if options.flashmla else None
    rows: list[dict[str, Any]] = []
    print(f"{device}, jax {jax.__version__}, seed {options.seed}")
    print(f"{'shape':30}{'implementation':16}{'us':>8}{'TFLOP/s':>9}{'error':>10}{'lse':>10}")
    for name in SHAPES:
        if options.only not in name:
            continue
        if time.perf_counter() - began > options.seconds:
            rows.append({"shape": name, "skipped": "out of time"})
            continue
        for row in measure(name, options.seed, peer):
            rows.append(row)
            print(_line(row), flush=True)
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
    if not (row["error"] < TOLERANCE and row["lse_error"] < TOLERANCE):
        return f"error not below {TOLERANCE}"
    if not row["repeats_bitwise"]:
        return "two runs differ"
    return ""


def _line(row: dict[str, Any]) -> str:
    line = f"{row['shape']:30}{row['implementation']:16}"
    if "us" in row:
        line += f"{row['us']:8.1f}{row['flops'] / row['us'] / 1e6:9.0f}"
    if "error" in row:
        line += f"{row['error']:10.1e}{row['lse_error']:10.1e}"
    return f"{line}  {row['failed']}".rstrip()


if __name__ == "__main__":
    raise SystemExit(main())

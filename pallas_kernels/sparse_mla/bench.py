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
import dataclasses
import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_quant import V3_2, V4, empty_pages, write
from pallas_kernels.sparse_mla import mosaic_gpu, reference
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.shapes import SHAPES, VERIFY, Shape

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


def implementations(shape: Shape, sm_scale: float) -> dict[str, tuple[str, Attend]]:
    """The kind of pools and a call of each way to run the shape."""
    run = functools.partial(mosaic_gpu.sparse_mla, sm_scale=sm_scale)
    found: dict[str, tuple[str, Attend]] = {"mosaic fp8": ("fp8", run), "mosaic": ("bf16", run)}
    if shape.heads % (2 * mosaic_gpu.HEADS) == 0:
        found["mosaic fp8, alone"] = "fp8", functools.partial(run, share_keys=False)
    elif shape.width == V4.width:
        found["mosaic fp8, registers"] = "fp8", functools.partial(run, ring=False)
    if shape.tokens <= 8:
        found["mosaic unsplit"] = "bf16", functools.partial(run, splits=1)
        xla = functools.partial(reference.sparse_mla, value_width=mosaic_gpu.VALUE_WIDTH)
        found["xla"] = "bf16", functools.partial(xla, sm_scale=sm_scale)
    return found


def operands(shape: Shape, seed: int) -> Operands:
    """Random queries, pools and full lists; NaN in the rows that nobody lists.

    Lists are random, or those of requests (`best_rows`, `window_rows`).
    """
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    rng = np.random.default_rng(seed)
    selections = []
    for entries in filter(None, (shape.keys, shape.extra)):
        pages = PAGES
        if not shape.requests:
            ids = jax.random.randint(next(keys), (shape.tokens, entries), 0, pages * PAGE)
        else:
            make = window_rows if entries == shape.keys and shape.extra else best_rows
            places, pages = make(shape, entries, rng)
            table = rng.permutation(pages)
            ids = jnp.asarray(table[places // PAGE] * PAGE + places % PAGE, jnp.int32)
        listed = jnp.zeros(pages * PAGE, bool).at[ids].set(True)
        pool = jax.random.normal(next(keys), (pages * PAGE, shape.width), jnp.bfloat16)
        pool = jnp.where(listed[:, None], pool, jnp.nan)
        selections.append(Selection(pool.reshape(pages, PAGE, -1), ids))
    rows = (shape.tokens, shape.heads, shape.width)
    # Scores of variance 4: some keys matter more than others.
    query = 2 * jax.random.normal(next(keys), rows, jnp.bfloat16)
    return query, tuple(selections), jax.random.normal(next(keys), (shape.heads,))


def window_rows(shape: Shape, entries: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Ascending places of windows, each one row past the one before, and pages that hold them."""
    window = shape.tokens // shape.requests
    pages = -(-(entries + window + PAGE) // PAGE)
    begin = np.arange(shape.requests) * pages * PAGE + rng.integers(0, PAGE, shape.requests)
    first = (begin[:, None] + np.arange(window)).reshape(-1, 1)
    return first + np.arange(entries), shape.requests * pages


def best_rows(shape: Shape, entries: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Ascending places of the best of four times as many rows, and pages that hold them.

    From a token of a request to the next 5 to 15 % of them are replaced.
    """
    window, rows = shape.tokens // shape.requests, 4 * entries
    found = np.empty((shape.requests, window, entries), np.int64)
    for request in range(shape.requests):
        order = rng.permutation(rows)
        for token in range(window):
            found[request, token] = np.sort(order[:entries])
            out = rng.choice(entries, int(entries * rng.uniform(0.05, 0.15)), replace=False)
            others = entries + rng.choice(rows - entries, len(out), replace=False)
            order[out], order[others] = order[others], order[out]
    found += (np.arange(shape.requests) * rows)[:, None, None]
    return found.reshape(shape.tokens, entries), shape.requests * rows // PAGE


@jax.jit
def quantised(selection: Selection) -> Selection:
    """The same rows in the bytes of the model that has keys of their width."""
    pages, page, width = selection.pool.shape
    layout = V3_2 if width == V3_2.width else V4
    rows = selection.pool.reshape(pages * page, width)
    pool = write(empty_pages(pages, page, layout), jnp.arange(len(rows)), rows, layout, page)
    return Selection(pool, selection.indices, page_size=page)


@functools.partial(jax.jit, static_argnames="sm_scale")
def wide(query: jax.Array, selections: Any, sinks: jax.Array, sm_scale: float) -> Any:
    """The operation in fp32 throughout."""
    query, selections = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (query, selections)
    )
    with jax.default_matmul_precision("highest"):
        return reference.sparse_mla(query, selections, sinks, sm_scale, mosaic_gpu.VALUE_WIDTH)


def expected(case: Operands, sm_scale: float) -> tuple[jax.Array, jax.Array]:
    """Results of the last tokens in fp32, computed on the CPU."""
    query, selections, sinks = case
    few = tuple(map(last_lists, selections))
    last = query[-CHECKED_TOKENS:]
    return wide(*jax.device_put((last, few, sinks), jax.devices("cpu")[0]), sm_scale)


@jax.jit
def last_lists(selection: Selection) -> Selection:
    """The lists of the last tokens, and a pool of nothing but their rows, as numbers."""
    rows = selection.rows()[-CHECKED_TOKENS:]
    keys = jax.vmap(lambda row: selection.keys(row, jnp.bfloat16))(rows)
    return Selection(keys, jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape))


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN counts."""
    difference = jnp.linalg.norm(got.astype(jnp.float32).ravel() - want.ravel())
    return float(difference / jnp.linalg.norm(want.ravel()))


def program(attend: Attend, estimate: float) -> tuple[Callable[..., Any], int]:
    """Dependent calls in one jitted program, lists prepared anew in each, and how many."""
    repeats = max(2, round(MILLISECONDS * 1e3 / estimate / CALLS))

    @jax.jit
    def run(query: jax.Array, selections: Any, sinks: jax.Array) -> Any:
        def calls(_: int, result: Any) -> Any:
            for _ in range(CALLS):
                shift = (result[1][0, 0] > 1e30).astype(jnp.int32)  # never: scores are small
                moved = [dataclasses.replace(s, indices=s.indices + shift) for s in selections]
                result = attend(query, tuple(moved), sinks)
            return result

        tokens, heads, _ = query.shape
        out = jnp.zeros((tokens, heads, mosaic_gpu.VALUE_WIDTH), query.dtype)
        return jax.lax.fori_loop(0, repeats, calls, (out, jnp.zeros((tokens, heads))))

    return run, CALLS * repeats


def measure_ours(
    attend: Attend, case: Operands, want: tuple[jax.Array, jax.Array], estimate: float
) -> dict[str, Any]:
    """Median µs of a call, errors of the last tokens' results, whether two runs agree bitwise."""
    run, calls = program(attend, estimate)
    out, lse = jax.block_until_ready(run(*case))
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        again, _ = jax.block_until_ready(run(*case))
        samples.append(time.perf_counter() - begin)
    last, cpu = slice(-CHECKED_TOKENS, None), jax.devices("cpu")[0]
    row = {
        "us": statistics.median(samples) / calls * 1e6,
        "error": relative_error(jax.device_put(out[last], cpu), want[0]),
        "lse_error": float(jnp.abs(jax.device_put(lse[last], cpu) - want[1]).max()),
        "repeats_bitwise": bool((out == again).all()),
    }
    return row | {"failed": _verdict(row)}


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
        import torch  # pyright: ignore[reportMissingImports]

        self.torch = torch
        torch.ops.load_library(str(library))
        self.ops = torch.ops._flashmla_C

    def runs(
        self, shape: Shape, selections: tuple[Selection, ...], sm_scale: float
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and a call of each kernel that takes the shape, over the same lists."""
        torch, device = self.torch, "cuda"
        query = 2 * torch.randn(shape.tokens, shape.heads, shape.width, device=device)
        query = query.bfloat16()
        rows = [s.pool.shape[0] * PAGE for s in selections]
        lists = [
            torch.from_numpy(np.array(s.indices, np.int32)).to(device)[:, None] for s in selections
        ]
        if sum(s.indices.shape[1] for s in selections) % 128 == 0:
            kv = torch.empty(sum(rows), 1, shape.width, device=device, dtype=torch.bfloat16)
            kv.normal_()
            ids = torch.cat([lists[0], *(ids + rows[0] for ids in lists[1:])], dim=2)
            yield (
                "flashmla bf16",
                lambda: self.ops.sparse_prefill_fwd(
                    query, kv, ids, sm_scale, 512, None, None, None
                ),
            )
        width = {576: 656, 512: 584}[shape.width]

        def cache(count: int) -> Any:
            # Bytes below 0x40 are finite e4m3 numbers, small scales and small bf16 numbers.
            size = (count // PAGE, PAGE, 1, width)
            return torch.randint(64, size, device=device, dtype=torch.uint8)

        rows_of_one = query[:, None]
        first = cache(rows[0]), lists[0]
        extra = (cache(rows[1]), lists[1], None) if len(rows) > 1 else (None, None, None)
        plan: list[Any] = [None, None]

        def decode() -> Any:
            out, _, *made = self.ops.sparse_decode_fwd(
                *(rows_of_one, *first, None, None, *plan, *extra),
                *(mosaic_gpu.VALUE_WIDTH, sm_scale, None),
            )
            plan[:] = made
            return out

        yield "flashmla fp8", decode

    def measure(self, call: Callable[[], Any]) -> dict[str, Any]:
        """A row's figures."""
        return {"us": self.microseconds(call), "failed": ""}

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


def measure(name: str, seed: int, peer: FlashMLA | None, chosen: str) -> Iterator[dict[str, Any]]:
    """A row for each implementation at the shape; a failure is a row too."""
    shape = (SHAPES | VERIFY)[name]
    sm_scale = shape.width**-0.5
    limits = floors(shape)
    estimate = 50 + 2 * limits["product_us"]
    numbers = operands(shape, seed)
    query, selections, sinks = numbers
    cases = {"bf16": numbers, "fp8": (query, tuple(map(quantised, selections)), sinks)}
    want = {kind: expected(case, sm_scale) for kind, case in cases.items()}
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        variant: functools.partial(measure_ours, attend, cases[kind], want[kind], estimate)
        for variant, (kind, attend) in implementations(shape, sm_scale).items()
    }
    if peer:
        for variant, call in peer.runs(shape, selections, sm_scale):
            calls[variant] = functools.partial(peer.measure, call)
    for variant, call in calls.items():
        if not re.search(chosen, variant):
            continue
        row: dict[str, Any] = {"shape": name, "implementation": variant}
        try:
            row |= call()
        except Exception as error:  # one variant must not cost the others their numbers
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
    parser.add_argument("--only", default="", help="shapes in whose name this is found (regex)")
    parser.add_argument("--choose", default="", help="implementations, in the same way")
    options = parser.parse_args()

    began = time.perf_counter()
    device = jax.devices()[0].device_kind
    report: dict[str, Any] = {"device": device, "jax": jax.__version__, "seed": options.seed}
    peer = FlashMLA(options.flashmla) if options.flashmla else None
    rows: list[dict[str, Any]] = []
    print(f"{device}, jax {jax.__version__}, seed {options.seed}")
    print(f"{'shape':30}{'implementation':20}{'us':>8}{'TFLOP/s':>9}{'error':>10}{'lse':>10}")
    for name in SHAPES | VERIFY:
        if not re.search(options.only, name):
            continue
        if time.perf_counter() - began > options.seconds:
            rows.append({"shape": name, "skipped": "out of time"})
            continue
        for row in measure(name, options.seed, peer, options.choose):
            rows.append(row)
            print(_line(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report | {"rows": rows}, indent=1))

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
    line = f"{row['shape']:30}{row['implementation']:20}"
    if "us" in row:
        line += f"{row['us']:8.1f}{row['flops'] / row['us'] / 1e6:9.0f}"
    if "error" in row:
        line += f"{row['error']:10.1e}{row['lse_error']:10.1e}"
    return f"{line}  {row['failed']}".rstrip()


if __name__ == "__main__":
    raise SystemExit(main())

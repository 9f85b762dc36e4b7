"""`dspark profile`: time the steps of serving on this machine and write a cost table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal


def profile(
    *,
    target: str,
    drafter: str,
    out: Path,
    plot: Path | None = None,
    max_requests: int = 16,
    batch_tiers: tuple[int, ...] = (),
    max_context: int | None = None,
    page_size: int = 64,
    k: int | None = None,
    temperature: float = 0.0,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> int:
    """Time verification and drafting, in every bucket of every batch tier and at several contexts.

    Args:
        target: smollm2-135m, a Hugging Face folder or id, or a .gguf file.
        drafter: a drafter folder, the name of a shipped one, or a Hugging Face id.
        out: the cost table, JSON.
        plot: draw timings and curves, PNG; needs matplotlib.
        max_requests: requests that are served together.
        batch_tiers: request counts that steps are compiled for, up to max-requests; the default is
            powers of four.
        max_context: tokens of prompt and answer together.
        page_size: cache rows of a page.
        k: drafts of a block; the default is the drafter's block size.
        temperature: above 0, the draws are part of what is timed.
        dtype: of weights and caches.
    """
    for file in (out, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise FileNotFoundError(f"no folder {file.absolute().parent} to write {file.name} in")
    plots = None if plot is None else importlib.import_module("dspark_jax.bench.plots")
    import jax.numpy as jnp
    from rich.console import Console
    from rich.table import Table

    from dspark_jax.checkpoints.drafter import load_drafter
    from dspark_jax.checkpoints.resolve import load_target
    from dspark_jax.decode.setup import tiers_for
    from dspark_jax.engine.config import EngineConfig
    from dspark_jax.engine.cost_profile import profile, write_table

    config = EngineConfig(
        max_requests=max_requests,
        batch_tiers=batch_tiers or None,
        max_context=max_context,
        mode="compact",
        k=k,
        page_size=page_size,
    )
    loaded = load_target(target, jnp.dtype(dtype))
    pair = (loaded.config, loaded.weights)
    loaded_drafter = load_drafter(
        drafter, pair, jnp.dtype(dtype), stop_token_ids=loaded.stop_token_ids
    )
    measured = profile(loaded, loaded_drafter, config, temperature=temperature, progress=True)
    write_table(measured, out)
    for tier in measured["tiers"]:
        requests = tier["requests"]
        shown = Table(f"{requests} requests", *(f"{rows} cache rows" for rows in tier["contexts"]))
        verify = tier["verify"]
        timed = [
            (f"verify {size} rows", seconds)
            for size, seconds in zip(verify["tokens"], verify["seconds"], strict=True)
        ]
        for name, seconds in (*timed, ("draft", tier["draft"])):
            shown.add_row(name, *(f"{1e3 * one:.2f} ms" for one in seconds))
        Console().print(shown)
    print(f"cost table written to {out}")
    if plots is not None and plot is not None:
        tiers = tiers_for(loaded, loaded_drafter, out, batch=max_requests)
        title = f"{loaded.name}, {measured['device']}, {dtype}, temperature {temperature:g}"
        print(f"figure written to {plots.draw_costs(plot, tiers, measured['samples'], title)}")
    return 0

"""`dspark bench`: fixed and adaptive settings of an engine under the same load."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_jax.bench.apart import Turn, at_once, take_turns
from dspark_jax.bench.arms import (
    ADAPTIVE,
    check_each_once,
    check_priced,
    check_used,
    chosen_arms,
)
from dspark_jax.bench.bench import Traffic, requests_at, run_arms
from dspark_jax.bench.record import Record, merge
from dspark_jax.bench.summary import mixed_traffic, verdicts
from dspark_jax.checkpoints import drafter as drafters
from dspark_jax.checkpoints import resolve
from dspark_jax.decode.request import SamplingParams
from dspark_jax.decode.setup import context_limit, tiers_for
from dspark_jax.engine.config import EngineConfig
from dspark_jax.json_file import read_object
from dspark_jax.text.prompt_file import read_prompts
from dspark_jax.text.text import Text

CONTEXT_STEP = 64


def bench(
    *,
    target: str,
    drafter: str,
    prompts: tuple[Path, ...],
    out: Path,
    concurrency: tuple[int, ...] = (1, 4, 16),
    batch_tiers: tuple[int, ...] = (),
    arms: tuple[str, ...] = (),
    cost_table: Path | None = None,
    calibration: Path | None = None,
    rounds: int = 4,
    min_requests: int = 16,
    repeats: int = 1,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    max_context: int | None = None,
    page_size: int = 64,
    steps: int | None = None,
    lag: int = 1,
    bound_blocks: bool = False,
    apart: bool = False,
    figures: Path | None = None,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> int:
    """Measure off, fixed k, static, compact and cap-accept over the same prompts, in one run.

    Args:
        target: smollm2-135m, a Hugging Face folder or id, or a .gguf file.
        drafter: a drafter folder, the name of a shipped one, or a Hugging Face id.
        prompts: JSON Lines files, a workload each; several are asked in turn.
        out: the raw result, JSON; written after every load of every arm.
        concurrency: users, each of whom asks again as soon as answered; one load after the other.
        batch_tiers: request counts that steps are compiled for, up to the largest load; the default
            is powers of four.
        arms: what to measure: off, k=1, k=2, k=3, k=5, k=7, static, compact, cap-accept; the
            default is all that the drafter allows.
        cost_table: from `dspark profile`; the arms compact and cap-accept need it.
        calibration: temperatures of the confidence head.
        rounds: requests of a user.
        min_requests: requests of a load at least.
        repeats: times that each load is run, in turn with those of the others where arms are
            apart; the run of middle throughput is kept.
        max_new_tokens: tokens to answer with at most.
        temperature: 0 is greedy.
        seed: request i uses seed + i.
        max_context: tokens of prompt and answer together; the default fits the prompts.
        page_size: cache rows of a page.
        steps: steps of one dispatch, beside one in which prompts are read; the default is 4 on a
            GPU, else 1.
        lag: age in steps of the confidences that decide a budget.
        bound_blocks: let the adaptive arms bound what full blocks would have committed, which
            takes time of its own, and compare that with what cap-accept saw; prices stay as they
            are, so that both arms walk and verify alike.
        apart: give every arm a process of its own, so that all compile at the same time and then
            take turns at each load: a machine that drifts does so for all of them. Needs --arms.
        figures: folder for policy.png, cost_curve.png and throughput_interactivity.png.
        dtype: of weights and caches.

    Returns:
        0, or 1 if an arm failed.
    """
    given = dict(locals())
    del given["apart"]
    _check_counts(concurrency, rounds, min_requests, repeats)
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {out.absolute().parent} to write {out.name} in")
    plots = None
    if figures is not None:
        plots = importlib.import_module("dspark_jax.bench.plots")
        figures.mkdir(parents=True, exist_ok=True)
    record = _run_apart(given) if apart else _run(**given)
    _print(record, several=len(prompts) > 1)
    print(f"raw result written to {out}")
    if plots is not None and figures is not None:
        written = plots.draw_all(figures, record.arms, record.facts["block_size"], _title(record))
        for path in written:
            print(f"figure written to {path}")
    return 1 if record.failed else 0


def _run_apart(given: dict[str, Any]) -> Record:
    """Every arm in a process of its own."""
    arms, out = given["arms"], given["out"]
    if not arms:
        raise ValueError("--apart is given without --arms; wanted the arms to start")
    check_each_once(arms)
    check_priced(arms, given["cost_table"])
    check_used(
        arms,
        cost_table=given["cost_table"] is not None,
        calibration=given["calibration"] is not None,
        bound_blocks=given["bound_blocks"],
    )
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=out.name) as folder:
        parts = {arm: Path(folder) / f"{arm}.json" for arm in arms}
        written = list(parts.values())
        work = functools.partial(_run_one, given, parts)
        loads = [users for users in given["concurrency"] for _ in range(given["repeats"])]
        lost = take_turns(arms, loads, work, lambda: merge(out, written))
        record = merge(out, written)
    for arm, how in lost.items():
        record.add({"arm": arm, "error": how})
    return record


def _run_one(given: dict[str, Any], parts: dict[str, Path], arm: str, turn: Turn) -> None:
    """One of several arms."""
    mine = given | {"arms": (arm,), "out": parts[arm]}
    adaptive = [one for one in parts if one in ADAPTIVE]
    if arm not in adaptive:
        mine |= {"cost_table": None, "calibration": None, "bound_blocks": False}
    if arm not in adaptive[:1]:
        mine["figures"] = None  # the curve of costs is drawn once
    _run(**mine, turn=turn)


def _run(
    *,
    target: str,
    drafter: str,
    prompts: tuple[Path, ...],
    out: Path,
    concurrency: tuple[int, ...],
    batch_tiers: tuple[int, ...],
    arms: tuple[str, ...],
    cost_table: Path | None,
    calibration: Path | None,
    rounds: int,
    min_requests: int,
    repeats: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    max_context: int | None,
    page_size: int,
    steps: int | None,
    lag: int,
    bound_blocks: bool,
    figures: Path | None,
    dtype: str,
    turn: Turn = at_once,
) -> Record:
    """Run these arms in this process, one after the other, and draw the curve of costs."""
    names = [path.stem for path in prompts]
    if len(set(names)) < len(names):
        raise ValueError(f"prompt files are named {', '.join(names)}; wanted each name once")
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    files = [read_prompts(path) for path in prompts]

    import jax.numpy as jnp

    loaded = resolve.load_target(target, jnp.dtype(dtype))
    if loaded.text is None:
        raise ValueError(f"target {target} has no tokenizer, so it cannot read text prompts")
    pair = drafters.load_drafter(
        drafter,
        (loaded.config, loaded.weights),
        jnp.dtype(dtype),
        stop_token_ids=loaded.stop_token_ids,
    )
    chosen = chosen_arms(arms, pair, cost_table)
    check_used(
        chosen,
        cost_table=cost_table is not None,
        calibration=calibration is not None,
        bound_blocks=bound_blocks,
    )
    most = max(requests_at(users, rounds, min_requests) for users in concurrency)
    traffic = _interleave(loaded.text, dict(zip(names, files, strict=True)), most)
    if max_context is None:
        longest = max(map(len, traffic.prompts)) + max_new_tokens
        needed = -(-(longest + 1) // CONTEXT_STEP) * CONTEXT_STEP
        limit = getattr(loaded.config, "max_position_embeddings", needed)
        max_context = context_limit(loaded.config, min(needed, limit))
    base = EngineConfig(
        max_requests=max(concurrency),
        batch_tiers=batch_tiers or None,
        max_context=max_context,
        lag=lag,
        cost_table=cost_table,
        calibration=calibration,
        page_size=page_size,
        prefix_reuse=False,  # or a load would find the prompts of the one before
        steps=steps,
        bound_blocks=bound_blocks,
        # corrected by their own step times, two arms would soon draft differently
        correct_costs=not bound_blocks,
    )
    ids = np.concatenate([np.asarray(one, np.int32) for one in traffic.prompts])
    record = Record(
        out,
        target=loaded.name,
        drafter=pair.name,
        dtype=dtype,
        block_size=pair.config.block_size,
        prompts={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in prompts},
        prompt_ids_sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
        concurrency=concurrency,
        batch_tiers=base.batches(),
        rounds=rounds,
        min_requests=min_requests,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        max_context=max_context,
        page_size=page_size,
        steps=[base.dispatch_steps(tier) for tier in base.batches()],
        lag=lag,
        bound_blocks=bound_blocks,
        cost_table=None if cost_table is None else cost_table.name,
        calibration=None if calibration is None else calibration.name,
    )
    run_arms(
        loaded,
        pair,
        base,
        chosen,
        concurrency,
        traffic,
        params,
        record,
        rounds=rounds,
        least=min_requests,
        repeats=repeats,
        turn=turn,
    )
    if figures is not None and cost_table is not None:
        tiers = tiers_for(loaded, pair, cost_table, batch=base.max_requests)
        samples = read_object(cost_table).get("samples", [])
        plots = importlib.import_module("dspark_jax.bench.plots")
        drawn = plots.draw_costs(figures / "cost_curve.png", tiers, samples, _title(record))
        print(f"figure written to {drawn}")
    return record


def _title(record: Record) -> str:
    facts = record.facts
    return (
        f"{facts['target']}, {facts['device']}, {facts['dtype']}, "
        f"temperature {facts['temperature']:g}"
    )


def _check_counts(
    concurrency: tuple[int, ...], rounds: int, min_requests: int, repeats: int
) -> None:
    increasing = all(a < b for a, b in itertools.pairwise(concurrency))
    if not concurrency or concurrency[0] < 1 or not increasing:
        raise ValueError(f"concurrency is {concurrency}; wanted increasing numbers of 1 or more")
    counts = (("rounds", rounds), ("min-requests", min_requests), ("repeats", repeats))
    for name, value in counts:
        if value < 1:
            raise ValueError(f"{name} is {value}; wanted 1 or more")


def _interleave(text: Text, files: dict[str, list[dict[str, Any]]], count: int) -> Traffic:
    """One prompt of each file in turn, each file from its beginning again when it ends."""
    prompts, workloads = [], []
    longest = max(map(len, files.values())) * len(files)
    for index in range(min(longest, -(-count // len(files)) * len(files))):
        name = list(files)[index % len(files)]
        lines = files[name]
        line = lines[index // len(files) % len(lines)]
        if "prompt" in line:
            prompts.append(text.encode(line["prompt"]))
        else:
            prompts.append(text.chat_ids([{"role": "user", "content": line["turns"][0]}]))
        workloads.append(name)
    return Traffic(prompts, workloads)


def _print(record: Record, *, several: bool) -> None:
    console = Console(width=120)
    facts = record.facts
    console.print(f"{facts['device']}, {facts['dtype']}, temperature {facts['temperature']:g}")
    table = Table(box=None)
    for name in ("arm", "users", "tok/s", "× off", "× best fixed", "tok/s a user", "slowest 10 %"):
        table.add_column(name)
    for name in ("accepted", "window", "fill", "skips"):
        table.add_column(name)
    for arm in record.arms:
        metrics = arm.get("metrics", {})
        table.add_row(
            arm["arm"] + (" FAILED" if "error" in arm else ""),
            str(arm.get("concurrency", "-")),
            _number(arm.get("tokens_per_second"), 1),
            _number(arm.get("ratio_to_off"), 2),
            _number(arm.get("ratio_to_best_fixed"), 3),
            _number(arm.get("interactivity"), 1),
            _number(arm.get("interactivity_p10"), 1),
            _number(arm.get("accepted_length"), 2),
            _number(arm.get("mean_window"), 2),
            _number(metrics.get("verify_bucket_fill"), 2),
            _number(metrics.get("draft_skips_total"), 0),
        )
    console.print(table)
    rows = mixed_traffic(record.arms)
    if several and rows:
        mixed = Table(box=None)
        columns = ("window", "accepted", "full blocks", "ceiling", "utilisation")
        for name in ("users", "workload", *columns):
            mixed.add_column(name)
        for row in rows:
            mixed.add_row(
                str(row["concurrency"]),
                row["workload"],
                _number(row["mean_window"], 2),
                _number(row["accepted_length"], 2),
                _number(row["full_length"], 2),
                _number(row["ceiling"], 2),
                _number(row["utilisation"], 3),
            )
        console.print("mixed traffic: compact under the ceiling of cap-accept")
        console.print(mixed)
    for one in verdicts(record.arms):
        console.print(_verdict(one), soft_wrap=True)


def _verdict(one: dict[str, Any]) -> str:
    """What a load shows, in a line."""
    said = [f"at {one['concurrency']}: utilisation {one['utilisation']:.3f}"]
    if one["windows_ordered"] is not None:
        said.append(f"windows {'' if one['windows_ordered'] else 'NOT '}ordered as acceptance is")
    for arm, bounds in one["bounds"].items():
        said.append(
            f"bounds of {arm} {bounds['low']:.3f} to {bounds['high']:.3f} "
            f"{'hold' if bounds['held'] else 'DO NOT hold'} {one['full_blocks']:.3f}"
        )
    return "; ".join(said)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

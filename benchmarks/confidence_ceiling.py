"""How well any confidence could tell accepted drafts from refused ones, above temperature 0.

    python -m benchmarks.confidence_ceiling --prompts PROMPTS --json ceiling.json

A draft x is drawn from q and accepted by another draw, with probability min(1, p(x) / q(x))
(Leviathan et al., arXiv 2211.17192). Of a score that has seen the drafts before x but not x itself,
as a confidence must not, the best is the sum of min(p, q) over the vocabulary; that the block
survives up to x, the product of the ratios of the drafts before x and of that sum. Both need the
target's distribution p, which a confidence head does not have. Full blocks of real decoding are
scored by head and by these.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool, Int
from rich.console import Console
from rich.table import Table

from benchmarks import held_out
from benchmarks.pair import open_drafter
from benchmarks.record import Record
from benchmarks.traces import groups
from dspark_jax.calibration.metrics import auroc
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import SMOLLM2, LoadedTarget, load_target
from dspark_jax.decode import loop, noise
from dspark_jax.decode.config import StepConfig
from dspark_jax.decode.draft import draft
from dspark_jax.decode.state import Requests, State, init_state
from dspark_jax.decode.step import Weights, decode_step
from dspark_jax.models.ragged import rectangle
from dspark_jax.schedule.cost import CostTables, no_costs


class Blocks(NamedTuple):
    """Full blocks.

    Attributes:
        confidence: ``[N, G]`` of the head, uncalibrated.
        overlap: ``[N, G]`` probability of acceptance before the draft is drawn, given those before.
        ratio: ``[N, G]`` the same of the draft that was drawn.
        accepted: ``[N]`` drafts accepted.
    """

    confidence: Any
    overlap: Any
    ratio: Any
    accepted: Any


@functools.partial(jax.jit, static_argnames=("config", "new_tokens"))
def _start(
    weights: Weights,
    prompts: Int[Array, "S P"],
    lengths: Int[Array, "S"],
    requests: Requests,
    *,
    config: StepConfig,
    new_tokens: int,
) -> State:
    """Prompts read, everyone about to decode."""
    slots, width = prompts.shape
    state = init_state(
        config,
        slots=slots,
        capacity=width + new_tokens,
        max_tokens=new_tokens,
        dtype=config.target.family.input_embedding(weights.target).dtype,
        stop_width=requests.stop_ids.shape[1],
    )
    every = jnp.arange(slots, dtype=jnp.int32)
    state = loop.prefill(weights, state, every, prompts, lengths - 1, config=config)
    anchor = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    return loop.admit(state, every, anchor, requests)


@functools.partial(jax.jit, static_argnames="config")
def _step(
    weights: Weights, state: State, tables: CostTables, *, config: StepConfig
) -> tuple[State, Bool[Array, "S"], Blocks]:
    """A step, and its blocks; only those are whole that the second result names."""
    keys = noise.step_keys(state.requests.seed, state.steps)
    drafts = draft(weights, state, keys, config.depth, config=config)
    rows = jnp.concatenate([state.anchor[:, None], drafts.tokens], axis=1)
    packed = rectangle(rows, state.cache.length, jnp.full((state.slots,), config.width))
    target = config.target.family
    hidden, _, _ = target.forward(config.target, weights.target, state.cache, packed, taps=())
    logits = packed.unpack(target.unembed(config.target, weights.target, hidden))[:, : config.depth]
    assert drafts.scores is not None, "the config says that requests sample"
    p = jax.nn.softmax(logits / state.requests.temperature[:, None, None], axis=-1)
    q = jax.nn.softmax(drafts.scores, axis=-1)
    drawn = functools.partial(jnp.take_along_axis, indices=drafts.tokens[..., None], axis=-1)
    ratio = jnp.minimum(drawn(p) / drawn(q), 1.0)[..., 0]
    overlap = jnp.minimum(p, q).sum(axis=-1)
    state, outcome = decode_step(weights, state, tables, config=config)
    full = (outcome.count > 0) & (outcome.window == config.depth)
    return state, full, Blocks(jax.nn.sigmoid(drafts.confidence), overlap, ratio, outcome.accepted)


def blocks(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    new_tokens: int,
    batch: int,
) -> Blocks:
    """Full blocks of answers to these prompts, on the host.

    Args:
        prompts: token ids.
        temperature: above 0.
        new_tokens: tokens of an answer at most.
        batch: prompts answered together.

    Raises:
        ValueError: no prompts, a temperature of 0, a drafter whose vocabulary is not the target's,
            or one without a confidence head.
    """
    if not prompts:
        raise ValueError("no prompt is left; wanted one or more")
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; wanted more than 0: no draw accepts a greedy draft"
        )
    if drafter.config.draft_vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the drafter draws from {drafter.config.draft_vocab_size} tokens; wanted the target's "
            f"{target.config.vocab_size}"
        )
    if not drafter.config.enable_confidence_head:
        raise ValueError(f"drafter {drafter.name} has no confidence head")
    config = StepConfig(target.config, drafter.config, "static", filtered=False)
    weights = Weights(target.weights, drafter.weights)

    def found() -> Iterator[Any]:
        how = {"temperature": temperature, "new_tokens": new_tokens, "batch": batch}
        for _, ids, lengths, requests in groups(target, prompts, **how):
            fixed = {"config": config, "new_tokens": new_tokens}
            state = _start(weights, ids, lengths, requests, **fixed)
            tables = no_costs(len(lengths), config.depth)
            while bool(state.active.any()):
                state, full, step = _step(weights, state, tables, config=config)
                yield [np.asarray(column)[np.asarray(full)] for column in step]

    return Blocks(*map(np.concatenate, zip(*found(), strict=True)))


def by_position(blocks: Blocks) -> list[dict[str, Any]]:
    """AUROC of head and ceiling at each position that a block reached, alone and up to it."""
    rows = []
    for j in range(min(int(blocks.accepted.max(initial=-1)) + 1, blocks.overlap.shape[1])):
        reached, survived = blocks.accepted >= j, blocks.accepted > j
        before = blocks.ratio[:, :j].prod(axis=1)
        alone = {"head": blocks.confidence[:, j], "ceiling": blocks.overlap[:, j]}
        whole = {
            "head": blocks.confidence[:, : j + 1].prod(axis=1),
            "ceiling": before * blocks.overlap[:, j],
        }
        rows.append(
            {
                "position": j + 1,
                "reached": int(reached.sum()),
                "accepted": float(survived[reached].mean()),
                "expected": float(blocks.overlap[reached, j].mean()),
            }
            | {
                f"alone_{name}": auroc(one[reached], survived[reached])
                for name, one in alone.items()
            }
            | {f"survival_{name}": auroc(one, survived) for name, one in whole.items()}
        )
    return rows


def main(
    prompts: Path,
    *,
    target: str = SMOLLM2,
    drafter: str = "smollm2-135m-dspark",
    temperature: float = 1.0,
    new_tokens: int = 160,
    batch: int = 8,
    limit: int = 100,
    most_prompt_tokens: int = 400,
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Score the drafts of held-out answers by their confidence and by their probability.

    Args:
        prompts: the prompt folder.
        target: a target as `dspark generate` takes it.
        drafter: a drafter with a confidence head.
        temperature: above 0.
        new_tokens: tokens of an answer at most.
        batch: prompts answered together.
        limit: prompts at most, from each set in turn.
        most_prompt_tokens: longer prompts are left out.
        output: where to write the raw result.
    """
    loaded = load_target(target, jnp.bfloat16)
    pair = open_drafter(drafter, loaded)
    asked = held_out.encode(loaded, held_out.interleave(held_out.load(prompts), limit))
    asked = [ids for ids in asked if len(ids) <= most_prompt_tokens]
    record = Record(output, target=target, drafter=drafter, prompts=len(asked))
    with record.arm(temperature=temperature, new_tokens=new_tokens) as entry:
        how = {"temperature": temperature, "new_tokens": new_tokens, "batch": batch}
        found = blocks(loaded, pair, asked, **how)
        entry["blocks"] = len(found.accepted)
        entry["positions"] = by_position(found)
        table = Table(title=f"AUROC, temperature {temperature:g}, {len(found.accepted)} blocks")
        for name in entry["positions"][0]:
            table.add_column(name.replace("_", " "))
        for row in entry["positions"]:
            table.add_row(
                *(f"{one:.3f}" if isinstance(one, float) else f"{one}" for one in row.values())
            )
        Console().print(table)
    return record.finish()


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

"""What the kernels for few rows give a decode step: its time with each of them on and off.

SmolLM2-135M's shapes with random weights: the figures are about speed alone. Every slot stays
occupied, as in ``benchmarks.speed``'s loop; compilation is not timed.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

from benchmarks.occupied import Occupied
from benchmarks.record import Record
from benchmarks.train_step import SHAPES, random_layers
from dspark_jax.checkpoints.drafter import LoadedDrafter
from dspark_jax.checkpoints.resolve import LoadedTarget
from dspark_jax.decode.config import Mode
from dspark_jax.decode.session import Generator
from dspark_jax.models.weights import DenseWeights
from pallas_kernels.rope_write import api as rope_write
from pallas_kernels.row_linear import api as row_linear
from train.initialize import drafter_config, initial_weights

CHUNKS = 3
CONTEXT = 1024
PROMPT = 100


def main(
    output: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    *,
    batches: tuple[int, ...] = (1,),
    modes: tuple[Mode, ...] = ("off", "static"),
) -> int:
    """Time the decode loop with every choice of ``rope_write`` and ``row_linear``."""
    record = Record(output, shape="smollm2-135m", weights="random")
    target, drafter = random_pair()
    for batch, mode, rope, rows in itertools.product(
        batches, modes, ("xla", "triton"), ("xla", "triton")
    ):
        rope_write.AUTOMATIC, row_linear.AUTOMATIC = rope, rows
        jax.clear_caches()
        with record.arm(batch=batch, mode=mode, rope_write=rope, row_linear=rows) as arm:
            session = Generator(
                target,
                None if mode == "off" else drafter,
                mode=mode,
                batch=batch,
                max_context=CONTEXT,
            )
            steps = (CONTEXT - PROMPT - batch) // ((CHUNKS + 1) * session.config.width)
            prompts = [list(range(10 + slot, 10 + slot + PROMPT)) for slot in range(batch)]
            chunks = Occupied(session, 0.0).time(prompts, min(steps, 128), CHUNKS)
            arm["step_ms"] = 1e3 * statistics.median(c.seconds / c.steps for c in chunks)
            print(f"{arm['step_ms']:.3f} ms a step")
    return record.finish()


def random_pair() -> tuple[LoadedTarget, LoadedDrafter]:
    """Target and drafter of SmolLM2-135M's shapes; no stop token ends an answer."""
    shape = SHAPES["smollm2-135m"]
    config = shape.target
    size = (config.vocab_size, config.hidden_size)
    embed = 0.02 * jax.random.normal(jax.random.key(0), size, jnp.bfloat16)
    norm = jnp.ones(config.hidden_size, jnp.bfloat16)
    weights = DenseWeights(embed, random_layers(config), norm, None)
    target = LoadedTarget(config, weights, None, (), "random weights")
    drafter = drafter_config(shape.drafter, target)
    wide = initial_weights(drafter, jax.random.key(1))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    return target, LoadedDrafter(drafter, narrow, "random weights")


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

"""Checks and times whole walks on a GPU.

A walk gathers the embedding of the token before, draws, and goes on to the next position; its
scores stay. The XLA side is the reference as a decode step would run it, stacking its scores at
the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench_table import Row, main_of, microseconds
from pallas_kernels.markov_sample import Confidence, Position, Sample, pallas_triton, reference
from pallas_kernels.markov_sample.pallas_triton import Tuning
from pallas_kernels.markov_sample.shapes import SHAPES, Shape

TUNINGS = (Tuning(128, 64, 8), Tuning(64, 64, 8), Tuning(32, 64, 4), Tuning(64, 32, 4))
"""Cuts tried beside the default."""
TUNED = ("qwen3-4b 8", "qwen3-4b 64")
"""Shapes that they are tried on: each compiles for seconds."""

Walk = Callable[["Drafter", jax.Array], tuple[jax.Array, Any]]


class Drafter(NamedTuple):
    """Weights and what the backbone left."""

    base: jax.Array
    hidden: jax.Array
    embeddings: jax.Array
    matrix: jax.Array
    weight: jax.Array
    temperature: jax.Array
    keys: jax.Array


def drafter(shape: Shape, seed: int) -> Drafter:
    """Random operands, scores with a deviation of about 3."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def draw(*sizes: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
        return (scale * jax.random.normal(next(keys), sizes)).astype(dtype)

    return Drafter(
        base=draw(shape.requests, shape.depth, shape.vocabulary, scale=3.0, dtype=jnp.float32),
        hidden=draw(shape.requests, shape.depth, shape.hidden),
        embeddings=draw(shape.vocabulary, shape.rank),
        matrix=draw(shape.vocabulary, shape.rank, scale=shape.rank**-0.5),
        weight=draw(shape.hidden + shape.rank, scale=shape.hidden**-0.5),
        temperature=jnp.ones(shape.requests),
        keys=jax.random.split(next(keys), shape.requests),
    )


def position(shape: Shape, one: Drafter, index: int, previous: jax.Array) -> Position:
    """Operands of a position after these tokens."""
    embedding = jnp.take(one.embeddings, previous, axis=0)
    fold = jax.vmap(jax.random.fold_in)
    head = Confidence(one.hidden[:, index], embedding, one.weight, None)
    # of the tokens as well: noise that never changed would leave the loop
    keys = fold(one.keys, previous * shape.depth + index) if shape.sampled else None
    return Position(one.base, embedding, one.matrix, one.temperature, keys, head)


def stacking(shape: Shape) -> Walk:
    """XLA's own operations, scores stacked at the end."""

    def walk(one: Drafter, previous: jax.Array) -> tuple[jax.Array, Any]:
        found: list[Sample] = []
        for index in range(shape.depth):
            operands = position(shape, one, index, previous)
            operands = operands._replace(base=one.base[:, index : index + 1])
            found.append(reference.markov_sample(operands, None, 0, 1))
            previous = found[-1].column
        scored = [one.scores for one in found if one.scores is not None]
        scores = jnp.concatenate(scored, axis=1) if scored else None
        return previous, (scores, [(one.column, one.logprob, one.confidence) for one in found])

    return walk


def kernel(shape: Shape, tuning: Tuning) -> Walk:
    """The kernel, scores written in place."""

    def walk(one: Drafter, previous: jax.Array) -> tuple[jax.Array, Any]:
        scores, rest = None, []
        for index in range(shape.depth):
            found = pallas_triton.markov_sample(
                position(shape, one, index, previous), scores, index, shape.depth, tuning=tuning
            )
            previous, scores = found.column, found.scores
            rest.append((found.column, found.logprob, found.confidence))
        return previous, (scores, rest)

    return walk


def rows(seed: int) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """A measurement for every shape and implementation."""
    for name, shape in SHAPES.items():
        variants = {"xla": stacking(shape), "triton": kernel(shape, pallas_triton.DEFAULT)}
        for tuning in TUNINGS if name in TUNED else ():
            variant = f"triton {tuning.tile}/{tuning.rows}/{tuning.warps}"
            variants[variant] = kernel(shape, tuning)
        for variant, walk in variants.items():
            yield name, variant, functools.partial(_measure, shape, variant, walk, seed)


def _measure(shape: Shape, variant: str, walk: Walk, seed: int) -> Row:
    one = drafter(shape, seed)
    start = jnp.arange(shape.requests, dtype=jnp.int32)
    row: Row = dataclasses.asdict(shape)
    if variant != "xla":
        row |= _check(shape, one, start, walk)

    def begin(one: Drafter, start: jax.Array) -> Any:
        # zeros made here: the loop would copy an argument
        shapes = jax.eval_shape(walk, one, start)[1]
        return start, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(carry: Any, one: Drafter, _: jax.Array) -> Any:
        return walk(one, carry[0])

    us = microseconds(begin, step, one, start, calls=1) / shape.depth
    return {"failed": ""} | row | {"us": us}


def _check(shape: Shape, one: Drafter, start: jax.Array, walk: Walk) -> Row:
    """The first position against the reference's."""
    _, (scores, found) = jax.jit(walk)(one, start)
    operands = position(shape, one, 0, start)
    operands = operands._replace(base=one.base[:, :1])
    wanted = jax.jit(reference.markov_sample, static_argnums=(2, 3))(operands, None, 0, 1)
    column, logprob, confidence = found[0]
    same = column == wanted.column
    errors = {"confidence": jnp.abs(confidence - wanted.confidence).max()}
    if shape.sampled:
        errors["score"] = jnp.abs(scores[:, 0] - wanted.scores[:, 0]).max()
        errors["logprob"] = jnp.where(same, jnp.abs(logprob - wanted.logprob), 0).max()
    errors = {name: float(error) for name, error in errors.items()}
    note = " ".join(f"{name} {error:.0e}" for name, error in errors.items())
    # written so that NaN fails
    failed = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e < 1e-2]
    if not same.mean() > 0.97:
        failed.append(f"only {float(same.mean()):.3f} of the draws are the reference's")
    return {"errors": errors, "note": note, "failed": ", ".join(failed)}


if __name__ == "__main__":
    raise SystemExit(main_of(__doc__, rows))

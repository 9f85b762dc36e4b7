"""The public operation: checks operands, picks an implementation, says once what it picked."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.choice import choose
from pallas_kernels.hopper import missing_hopper
from pallas_kernels.markov_sample import pallas_triton, reference
from pallas_kernels.markov_sample.operands import Position, Sample

Implementation = Literal["xla", "triton"]

AUTOMATIC: Implementation = "xla"
"""What None takes where both can run (docs/kernels/markov_sample.md has the times)."""


def markov_sample(
    operands: Position,
    scores: Float[Array, "S G Vd"] | None,
    index: int,
    depth: int,
    *,
    last: bool = False,
    implementation: Implementation | None = None,
) -> Sample:
    """Draw position ``index`` of a block of ``depth``: softmax((base + W2 e) / temperature).

    The draw is the largest of scores plus Gumbel noise, the lowest column among equals; the noise
    of a request is ``jax.random.gumbel`` of its key.

    Args:
        operands: of the position.
        scores: what earlier positions returned, whose rows are kept; None at the first.
        index: position in the block, and in ``operands.base``.
        depth: G.
        last: no position follows; scores of later ones are then zeros. Before that they hold
            anything.
        implementation: ``"xla"`` runs anywhere; ``"triton"`` needs a Hopper GPU, fp32 base logits,
            bf16 ``ranked`` and ``matrix``, and a rank of 16, 32, 64, 128 or 256. Its scores differ
            in rounding; what it draws is drawn from exactly the scores it returns. None takes
            `AUTOMATIC` where that can run and xla elsewhere.

    Raises:
        ValueError: shapes disagree, or ``implementation`` is unknown.
        NotImplementedError: ``"triton"`` was asked for and cannot run.
    """
    _check_shapes(operands, scores, index, depth)
    if kernel_runs(operands, implementation=implementation):
        return pallas_triton.markov_sample(operands, scores, index, depth, last=last)
    return reference.markov_sample(operands, scores, index, depth)


def kernel_runs(operands: Position, *, implementation: Implementation | None = None) -> bool:
    """Whether `markov_sample` would run the kernel on these operands; same errors."""
    chosen = choose(
        "markov_sample",
        "triton",
        implementation,
        AUTOMATIC,
        lambda: missing_hopper() or pallas_triton.unsupported(operands),
    )
    return chosen == "triton"


def _check_shapes(
    operands: Position, scores: Float[Array, "S G Vd"] | None, index: int, depth: int
) -> None:
    requests, walked, columns = operands.base.shape
    rank = operands.ranked.shape[-1]
    wanted = {
        "ranked": (operands.ranked, (requests, rank)),
        "matrix": (operands.matrix, (columns, rank)),
        "temperature": (operands.temperature, (requests,)),
        "keys": (operands.keys, (requests,)),
        "scores": (scores, (requests, depth, columns)),
    }
    for name, (operand, shape) in wanted.items():
        if operand is not None and operand.shape != shape:
            raise ValueError(f"{name} has shape {operand.shape}, wanted {shape}")
    if not 0 <= index < min(walked, depth):
        raise ValueError(f"index is {index}, wanted 0..{min(walked, depth) - 1}")

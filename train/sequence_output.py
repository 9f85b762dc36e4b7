"""What a target says of whole sequences, and what its layers report for its own training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float


@flax.struct.dataclass
class LayerReport:
    """One layer: the loss of its indexer, and the share of places that each expert got.

    None where the layer has no indexer, or no experts whose load a bias steers.
    """

    indexer_loss: Float[Array, ""] | None
    expert_load: Float[Array, "X"] | None


@flax.struct.dataclass
class SequenceOutput:
    """A forward of whole sequences.

    Attributes:
        taps: layer outputs side by side, in the order asked (``models.protocol``).
        last_hidden: states after the final norm.
        reports: one a layer.
    """

    taps: Float[Array, "B K n*D"]
    last_hidden: Float[Array, "B K D"]
    reports: tuple[LayerReport, ...]


def collect(
    outputs: Mapping[int, Array],
    taps: tuple[int, ...],
    last_hidden: Float[Array, "B K D"],
    reports: Sequence[LayerReport],
) -> SequenceOutput:
    """The output with the taps picked from ``outputs``, by layer."""
    tapped = [outputs[tap] for tap in taps]
    nothing = jnp.zeros((*last_hidden.shape[:-1], 0), last_hidden.dtype)
    joined = jnp.concatenate(tapped, axis=-1) if tapped else nothing
    return SequenceOutput(joined, last_hidden, tuple(reports))

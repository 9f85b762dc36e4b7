"""What the heads of a drafter make of its blocks, short of the vocabulary."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.models.layers import linear


@flax.struct.dataclass
class DraftHeads:
    """Draft slots in front of the vocabulary, teacher forced.

    Attributes:
        states: what ``matrix`` is applied to.
        ranked: what the sequential head's ``w2`` is applied to, None without such a head.
        confidence: fp32 logits of the confidence head, None without one.
        matrix: frozen, from states to base logits.
        w2: from rank to a bias on them.
    """

    states: Float[Array, "... D"]
    ranked: Float[Array, "... R"] | None
    confidence: Float[Array, "..."] | None
    matrix: Float[Array, "Vd D"]
    w2: Float[Array, "Vd R"] | None

    def logits(self) -> Float[Array, "... Vd"]:
        """fp32 logits of every slot at once."""
        base = frozen_logits(self.states.astype(self.matrix.dtype), self.matrix)
        if self.ranked is None or self.w2 is None:
            return base
        return base + linear(self.ranked, self.w2, jnp.float32)


def frozen_logits(
    hidden: Float[Array, "... D"], head: Float[Array, "V D"]
) -> Float[Array, "... V"]:
    """fp32 logits of a frozen head."""
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)

"""Weights and context of the DeepSeek-V4 drafter as pytrees (matrices ``[out, in]``)."""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float, Int

from dspark_jax.models.deepseek_v4.weights import Layer, StreamHead


@flax.struct.dataclass
class DeepseekV4DrafterWeights:
    """A drafter; embedding and head are the target's.

    ``confidence`` reads [hidden before the final norm; Markov embedding], without a bias, and
    stays fp32. The vocabularies are the same, so ``draft_to_target`` is None.
    """

    main_proj: Float[Array, "D nD"]
    main_norm: Float[Array, "D"]
    stages: tuple[Layer, ...]
    stream_head: StreamHead
    norm: Float[Array, "D"]
    markov_w1: Float[Array, "V R"]
    markov_w2: Float[Array, "V R"]
    confidence: Float[Array, "D+R"]
    draft_to_target: None = None


class RingContext(flax.struct.PyTreeNode):
    """Key-value rows of the last committed tokens, one pool of rings a stage.

    The row of position p lies at ``p % R`` of its slot's ring, which ``ring_table`` names.
    """

    rings: tuple[Float[Array, "N R E"], ...]
    ring_table: Int[Array, "S 1"]

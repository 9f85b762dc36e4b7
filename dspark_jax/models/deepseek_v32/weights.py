"""Weights of a DeepSeek-V3.2 decoder as pytrees (matrices ``[out, in]``, one entry a layer).

Letters beside the project's: Q query rank, C latent, R rotated part, E head width without
position, U value width, J index heads, I index width, X experts, F expert width.
"""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float

from dspark_jax.models.experts import Experts


@flax.struct.dataclass
class Indexer:
    """What chooses the rows a token attends to; its projections run with the attention's.

    ``key_norm`` and ``key_bias`` are those of a layer norm, ``head_weight`` is fp32.
    """

    key_norm: Float[Array, "I"]
    key_bias: Float[Array, "I"]
    head_weight: Float[Array, "J D"]


@flax.struct.dataclass
class Attention:
    """Latent attention, absorbed.

    Attributes:
        narrow: rows of the low-rank query, the latent, the rotated key and the index key.
        wide: rows of all query heads (each E, then R), then of all index queries.
        key_up: latent to keys, per head; applied to queries instead.
        value_up: latent to values, per head; applied to what was attended to.
    """

    narrow: Float[Array, "Q+C+R+I D"]
    query_norm: Float[Array, "Q"]
    latent_norm: Float[Array, "C"]
    wide: Float[Array, "H(E+R)+JI Q"]
    key_up: Float[Array, "H E C"]
    value_up: Float[Array, "H U C"]
    out: Float[Array, "D HU"]
    indexer: Indexer


@flax.struct.dataclass
class Mlp:
    """A SwiGLU MLP; ``gate_up`` rows hold the gate half, then the up half."""

    gate_up: Float[Array, "2F D"]
    down: Float[Array, "D F"]


@flax.struct.dataclass
class Moe:
    """Routed experts and shared ones (as one MLP); ``router`` and ``bias`` are fp32."""

    router: Float[Array, "X D"]
    bias: Float[Array, "X"]
    experts: Experts
    shared: Mlp


@flax.struct.dataclass
class Layer:
    """One decoder layer."""

    attention_norm: Float[Array, "D"]
    attention: Attention
    ffn_norm: Float[Array, "D"]
    ffn: Mlp | Moe


@flax.struct.dataclass
class DeepseekV32Weights:
    """A DeepSeek-V3.2 decoder."""

    embed: Float[Array, "V D"]
    layers: tuple[Layer, ...]
    norm: Float[Array, "D"]
    head: Float[Array, "V D"]

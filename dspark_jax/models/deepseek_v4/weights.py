"""Weights of a DeepSeek-V4 decoder as pytrees.

Matrices are stored ``[out, in]``. Residual mixing, routing, compression and sinks are fp32
whatever the dtype of the rest: DeepSeek computes them so. X experts, n streams, H heads of width
E, F the width of an expert.
"""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float, Int

from dspark_jax.models.experts import Experts


@flax.struct.dataclass
class HyperConnection:
    """What reads and writes the residual streams around one sub-layer (``hyper_connections``)."""

    fn: Float[Array, "(2+n)n nD"]
    base: Float[Array, "(2+n)n"]
    scale: Float[Array, "3"]


@flax.struct.dataclass
class StreamHead:
    """What joins the residual streams before the final norm."""

    fn: Float[Array, "n nD"]
    base: Float[Array, "n"]
    scale: Float[Array, "1"]


@flax.struct.dataclass
class Compressor:
    """Pools r tokens into an entry of width E; ``C`` is E, or 2E where windows overlap."""

    kv: Float[Array, "C D"]
    gate: Float[Array, "C D"]
    ape: Float[Array, "r C"]
    norm: Float[Array, "E"]


@flax.struct.dataclass
class Indexer:
    """Chooses entries: J heads of width I, whose keys have a compressor of their own."""

    query: Float[Array, "JI q"]
    head_weight: Float[Array, "J D"]
    compressor: Compressor


@flax.struct.dataclass
class Attention:
    """One attention layer. ``out_a`` holds the o_groups matrices one below the other.

    ``compressor`` is None where the layer has a window alone, ``indexer`` where all entries
    are attended to.
    """

    query_a: Float[Array, "q D"]
    query_norm: Float[Array, "q"]
    query_b: Float[Array, "HE q"]
    kv: Float[Array, "E D"]
    kv_norm: Float[Array, "E"]
    sink: Float[Array, "H"]
    out_a: Float[Array, "go HE/g"]
    out_b: Float[Array, "D go"]
    compressor: Compressor | None
    indexer: Indexer | None


@flax.struct.dataclass
class Moe:
    """Routed experts and the shared one.

    Either ``bias`` is set (scored routing) or ``expert_of_token`` (hash routing).
    """

    router: Float[Array, "X D"]
    bias: Float[Array, "X"] | None
    expert_of_token: Int[Array, "V c"] | None
    experts: Experts
    shared_gate_up: Float[Array, "2F D"]
    shared_down: Float[Array, "D F"]


@flax.struct.dataclass
class Layer:
    """One decoder layer."""

    attention_mix: HyperConnection
    attention_norm: Float[Array, "D"]
    attention: Attention
    moe_mix: HyperConnection
    moe_norm: Float[Array, "D"]
    moe: Moe


@flax.struct.dataclass
class DeepseekV4Weights:
    """A DeepSeek-V4 decoder; embedding and head are never tied."""

    embed: Float[Array, "V D"]
    layers: tuple[Layer, ...]
    stream_head: StreamHead
    norm: Float[Array, "D"]
    head: Float[Array, "V D"]

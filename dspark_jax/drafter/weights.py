"""Weights and context cache of a DSpark drafter as pytrees (matrices ``[out, in]``)."""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class DrafterLayer:
    """One Qwen3-style draft layer. ``kv`` rows: all key heads, then all value heads.

    Context rows need only ``kv``, block rows also ``q``.
    """

    input_norm: Float[Array, "D"]
    q: Float[Array, "HE D"]
    kv: Float[Array, "2NE D"]
    out: Float[Array, "D HE"]
    q_norm: Float[Array, "E"]
    k_norm: Float[Array, "E"]
    post_norm: Float[Array, "D"]
    gate_up: Float[Array, "2F D"]
    down: Float[Array, "D F"]


@flax.struct.dataclass
class MarkovHead:
    """Sequential head. ``w1`` looks up the previous token, ``w2`` maps rank to vocabulary.

    ``gate`` (gated: ``[R, D+R]``; input [hidden; embedding]) and ``joint`` (rnn:
    ``[3R, 2R+D]``; input [state; embedding; hidden]) carry a bias each; None elsewhere.
    """

    w1: Float[Array, "V R"]
    w2: Float[Array, "Vd R"]
    gate: Float[Array, "R D+R"] | None = None
    gate_bias: Float[Array, "R"] | None = None
    joint: Float[Array, "3R 2R+D"] | None = None
    joint_bias: Float[Array, "3R"] | None = None


@flax.struct.dataclass
class ConfidenceHead:
    """Linear confidence logit over [hidden; embedding] or hidden alone."""

    weight: Float[Array, "D_or_D+R"]
    bias: Float[Array, ""]


@flax.struct.dataclass
class DrafterWeights:
    """A drafter. ``embed`` and ``lm_head`` are None when they are the target's.

    ``draft_to_target`` holds the target id of every draft-vocabulary column, None when the
    vocabularies are the same.
    """

    fc: Float[Array, "D nDt"]
    hidden_norm: Float[Array, "D"]
    layers: tuple[DrafterLayer, ...]
    norm: Float[Array, "D"]
    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    embed: Float[Array, "V D"] | None = None
    lm_head: Float[Array, "Vd D"] | None = None
    draft_to_target: Int[Array, "Vd"] | None = None


@flax.struct.dataclass
class ContextCache:
    """Keys and values of injected context, one array a layer; committed rows only.

    B pages of P rows. ``table`` names the pages of every slot (``models.pages``); None means that
    slot s has one page, page s.
    """

    keys: tuple[Float[Array, "B N P E"], ...]
    values: tuple[Float[Array, "B N P E"], ...]
    table: Int[Array, "S C"] | None = None

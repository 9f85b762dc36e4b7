"""Weights and cache of a dense decoder as pytrees.

Matrices are stored ``[out, in]``, as in checkpoints, and applied by ``layers.linear``: the
products of a few bf16 rows run a fifth faster that way on CPUs. One entry a layer, never a
stack: decoding unrolls the layers.
"""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class DenseLayer:
    """One decoder layer. H query heads, N key/value heads of width E, MLP width F.

    ``qkv`` rows hold all query heads, then all key heads, then all value heads;
    ``gate_up`` rows hold the gate half, then the up half.
    """

    input_norm: Float[Array, "D"]
    qkv: Float[Array, "(H+2N)E D"]
    out: Float[Array, "D HE"]
    post_norm: Float[Array, "D"]
    gate_up: Float[Array, "2F D"]
    down: Float[Array, "D F"]
    q_norm: Float[Array, "E"] | None
    k_norm: Float[Array, "E"] | None


@flax.struct.dataclass
class DenseWeights:
    """A dense decoder. ``lm_head`` is None when the embedding is tied."""

    embed: Float[Array, "V D"]
    layers: tuple[DenseLayer, ...]
    norm: Float[Array, "D"]
    lm_head: Float[Array, "V D"] | None

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output embedding, tied or not."""
        return self.embed if self.lm_head is None else self.lm_head


@flax.struct.dataclass
class DenseCache:
    """Keys and values, one array a layer, ``[B, N, P, E]``: B pages of P rows.

    ``length`` counts committed rows; rows at or past it are scratch and never attended
    except by the batch that wrote them. ``table`` names the pages of every slot
    (``models.pages``); None means that slot s has one page, page s.
    """

    keys: tuple[Float[Array, "B N P E"], ...]
    values: tuple[Float[Array, "B N P E"], ...]
    length: Int[Array, "S"]
    table: Int[Array, "S C"] | None = None

    @property
    def capacity(self) -> int:
        """Rows a request can hold, scratch included."""
        return self.keys[0].shape[2] * (1 if self.table is None else self.table.shape[1])

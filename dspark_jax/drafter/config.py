"""Static description of a DSpark drafter (or DFlash: ``markov_rank`` 0)."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Literal

from dspark_jax.models.config import RopeScaling


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shapes and constants of a drafter; hashable. Names are DeepSpec's.

    ``target_layer_ids`` follow DeepSpec: i is the output of target layer i, -1 the embedding
    output; the final layer is not allowed. ``target_hidden_size`` is the width of one tap.
    ``draft_vocab_size`` equals ``vocab_size`` unless the checkpoint is pruned.
    ``markov_rank`` 0 means no sequential head, whatever ``markov_head_type`` says.
    """

    block_size: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sliding_window: int | None = None
    rope_scaling: RopeScaling | None = None

    @property
    def family(self) -> ModuleType:
        """The module that implements the drafter protocol (``drafter/protocol.py``)."""
        from dspark_jax.drafter import dspark

        return dspark

"""Static description of a dense decoder (Llama family, Qwen3)."""

from __future__ import annotations

import dataclasses
from types import ModuleType


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency rescaling (``rope_type`` "llama3"); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Shapes and constants of a dense decoder; hashable, so it can be a static jit argument.

    Field names are those of Hugging Face configs. ``qk_norm`` is Qwen3's RMS norm of every
    query and key head before RoPE. ``max_position_embeddings`` is the context in tokens.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def family(self) -> ModuleType:
        """The module that implements the target protocol (``models/protocol.py``)."""
        from dspark_jax.models import dense

        return dense

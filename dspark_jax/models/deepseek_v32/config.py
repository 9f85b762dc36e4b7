"""Static description of a DeepSeek-V3.2 decoder."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

from dspark_jax.models.deepseek_rope import Yarn


@dataclasses.dataclass(frozen=True)
class DeepseekV32Config:
    """Shapes and constants of a DeepSeek-V3.2 decoder; hashable. Names are DeepSeek's.

    Attributes:
        q_lora_rank: width of the query before its heads, which the indexer reads too.
        kv_lora_rank: width of the latent that is cached for each token and stands for the keys
            and values of all heads.
        qk_nope_head_dim: width of a query head without position.
        qk_rope_head_dim: width of its rotated part; the one rotated key of a token has it too.
        v_head_dim: width of a head's output.
        index_topk: rows that each token attends to at most.
        first_k_dense_replace: first layers, which have one MLP of width ``intermediate_size``
            instead of experts.
        n_group, topk_group: groups of experts, and how many of them a token may use.
        yarn_mscale: YaRN's factor of the scores before it is squared; 1 without YaRN.
        num_nextn_predict_layers: layers of a multi-token head that a checkpoint holds behind
            the decoder's; they are not read.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    yarn: Yarn | None = None
    yarn_mscale: float = 1.0
    num_nextn_predict_layers: int = 0

    model_type = "deepseek_v32"

    @property
    def family(self) -> ModuleType:
        """The module that implements the target protocol (``models/protocol.py``)."""
        from dspark_jax.models.deepseek_v32 import model

        return model

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores: that of unabsorbed heads, times YaRN's squared."""
        return self.yarn_mscale**2 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def row_width(self) -> int:
        """Numbers of a cached latent row: the latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

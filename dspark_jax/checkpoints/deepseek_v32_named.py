"""A DeepSeek-V3.2 decoder as DeepSeek spells it: fields of ``config.json``, tensors by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from dspark_jax.checkpoints.deepseek_named import Tensors, named_experts, named_mlp
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from dspark_jax.models.deepseek_v32.weights import Attention, DeepseekV32Weights, Mlp, Moe


def deepseek_v32_fields(config: DeepseekV32Config) -> dict[str, Any]:
    """The inverse of ``deepseek_v32_config``."""
    fields = dataclasses.asdict(config)
    yarn, sharpened = fields.pop("yarn"), fields.pop("yarn_mscale")
    if yarn is not None:
        stretch = 0.1 * math.log(max(yarn["factor"], 1.0))
        mscale = round((sharpened - 1) / stretch, 9) if stretch else 1.0
        fields["rope_scaling"] = {
            "type": "yarn",
            **yarn,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    return {
        "model_type": config.model_type,
        "architectures": ["DeepseekV32ForCausalLM"],
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **fields,
    }


def deepseek_v32_tensors(config: DeepseekV32Config, weights: DeepseekV32Weights) -> Tensors:
    """The inverse of ``deepseek_v32_weights``."""
    named: Tensors = {
        "embed.weight": weights.embed,
        "norm.weight": weights.norm,
        "head.weight": weights.head,
    }
    for number, layer in enumerate(weights.layers):
        own = {
            "attn_norm.weight": layer.attention_norm,
            "ffn_norm.weight": layer.ffn_norm,
            **_attention(config, layer.attention),
            **_feed_forward(layer.ffn),
        }
        named |= {f"layers.{number}.{name}": value for name, value in own.items()}
    return named


def _attention(config: DeepseekV32Config, attention: Attention) -> Tensors:
    query, latent = config.q_lora_rank, config.row_width
    low, row, index_key = jnp.split(attention.narrow, [query, query + latent])
    heads = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    own, index_query = jnp.split(attention.wide, [heads])
    up = jnp.concatenate([attention.key_up, attention.value_up], axis=1)
    return {
        "attn.wq_a.weight": low,
        "attn.q_norm.weight": attention.query_norm,
        "attn.wq_b.weight": own,
        "attn.wkv_a.weight": row,
        "attn.kv_norm.weight": attention.latent_norm,
        "attn.wkv_b.weight": up.reshape(-1, config.kv_lora_rank),
        "attn.wo.weight": attention.out,
        "attn.indexer.wq_b.weight": index_query,
        "attn.indexer.wk.weight": index_key,
        "attn.indexer.k_norm.weight": attention.indexer.key_norm,
        "attn.indexer.k_norm.bias": attention.indexer.key_bias,
        "attn.indexer.weights_proj.weight": attention.indexer.head_weight,
    }


def _feed_forward(fed: Mlp | Moe) -> Tensors:
    if isinstance(fed, Mlp):
        return named_mlp("ffn.", fed.gate_up, fed.down)
    return {
        "ffn.gate.weight": fed.router,
        "ffn.gate.bias": fed.bias,
        **named_mlp("ffn.shared_experts.", fed.shared.gate_up, fed.shared.down),
        **named_experts("ffn.experts.", fed.experts),
    }

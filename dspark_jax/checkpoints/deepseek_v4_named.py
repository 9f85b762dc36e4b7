"""A DeepSeek-V4 decoder as DeepSeek spells it: fields of ``config.json``, tensors by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.checkpoints.deepseek_named import Tensors, named_experts, named_mlp
from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v4.weights import (
    Attention,
    Compressor,
    DeepseekV4Weights,
    HyperConnection,
    Layer,
    Moe,
    StreamHead,
)


def deepseek_v4_fields(config: DeepseekV4Config) -> dict[str, Any]:
    """The inverse of ``deepseek_v4_config``."""
    fields = dataclasses.asdict(config)
    yarn = fields.pop("compress_yarn")
    if yarn is not None:
        fields["rope_scaling"] = {"type": "yarn", **yarn}
    return {
        "model_type": config.model_type,
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        **fields,
        "compress_ratios": list(config.compress_ratios),
    }


def deepseek_v4_tensors(weights: DeepseekV4Weights) -> Tensors:
    """The inverse of ``deepseek_v4_weights``."""
    named: Tensors = {
        "embed.weight": weights.embed,
        "norm.weight": weights.norm,
        "head.weight": weights.head,
        **named_mixture("hc_head", weights.stream_head),
    }
    for number, layer in enumerate(weights.layers):
        named |= named_layer(f"layers.{number}.", layer)
    return named


def named_layer(prefix: str, layer: Layer) -> Tensors:
    """One decoder layer (or drafter stage)."""
    named = {
        "attn_norm.weight": layer.attention_norm,
        "ffn_norm.weight": layer.moe_norm,
        **named_mixture("hc_attn", layer.attention_mix),
        **named_mixture("hc_ffn", layer.moe_mix),
        **_attention(layer.attention),
        **_moe(layer.moe),
    }
    return {prefix + name: value for name, value in named.items()}


def named_mixture(prefix: str, mix: HyperConnection | StreamHead) -> Tensors:
    """What reads, writes or joins the residual streams."""
    return {f"{prefix}_fn": mix.fn, f"{prefix}_base": mix.base, f"{prefix}_scale": mix.scale}


def _attention(attention: Attention) -> Tensors:
    named: Tensors = {
        "attn.wq_a.weight": attention.query_a,
        "attn.q_norm.weight": attention.query_norm,
        "attn.wq_b.weight": attention.query_b,
        "attn.wkv.weight": attention.kv,
        "attn.kv_norm.weight": attention.kv_norm,
        "attn.attn_sink": attention.sink,
        "attn.wo_a.weight": attention.out_a,
        "attn.wo_b.weight": attention.out_b,
    }
    if attention.compressor is not None:
        named |= _compressor("attn.compressor.", attention.compressor)
    if attention.indexer is not None:
        named |= {
            "attn.indexer.wq_b.weight": attention.indexer.query,
            "attn.indexer.weights_proj.weight": attention.indexer.head_weight,
            **_compressor("attn.indexer.compressor.", attention.indexer.compressor),
        }
    return named


def _compressor(prefix: str, compressor: Compressor) -> Tensors:
    return {
        f"{prefix}wkv.weight": compressor.kv,
        f"{prefix}wgate.weight": compressor.gate,
        f"{prefix}ape": compressor.ape,
        f"{prefix}norm.weight": compressor.norm,
    }


def _moe(moe: Moe) -> Tensors:
    named = {
        "ffn.gate.weight": moe.router,
        **named_mlp("ffn.shared_experts.", moe.shared_gate_up, moe.shared_down),
        **named_experts("ffn.experts.", moe.experts),
    }
    if moe.bias is not None:
        named["ffn.gate.bias"] = moe.bias
    if moe.expert_of_token is not None:
        named["ffn.gate.tid2eid"] = moe.expert_of_token
    return named

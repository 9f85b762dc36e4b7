"""The ``config.json`` of a DeepSeek-V3.2 checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints.field_kinds import check_kinds
from dspark_jax.checkpoints.target import check_positive
from dspark_jax.checkpoints.yarn_fields import yarn_of
from dspark_jax.models.deepseek_rope import Yarn
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config

# What another value of these would change is not implemented.
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_SPARSE_ATTENTION = ("indexed_attention", "deepseek_sparse_attention")
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_OPTIONAL = ("num_nextn_predict_layers",)


def deepseek_v32_config(raw: Mapping[str, Any], where: Path | str) -> DeepseekV32Config:
    """The contents of a ``config.json`` as a ``DeepseekV32Config``.

    Reads ``rope_parameters`` (transformers 5) and ``rope_theta`` / ``rope_scaling`` (before).

    Raises:
        ValueError: fields missing, of the wrong kind or contradicting, or a feature that is
            not supported; ``where`` says whose.
    """
    check_kinds(raw, where)
    for name, wanted in _FIXED.items():
        if raw.get(name) is not None and raw[name] != wanted:
            raise ValueError(f"{where}: {name} is {raw[name]!r}, wanted {wanted!r}")
    quantization = raw.get("quantization_config") or {}
    for name, wanted in _FP8.items():
        if quantization and quantization.get(name, wanted) != wanted:
            raise ValueError(
                f"{where}: {name} of quantization_config is {quantization[name]!r}, "
                f"wanted {wanted!r}"
            )
    counts = [field.name for field in dataclasses.fields(DeepseekV32Config) if field.type == "int"]
    floats = ["routed_scaling_factor", "rms_norm_eps"]
    missing = [
        name for name in (*counts, *floats) if raw.get(name) is None and name not in _OPTIONAL
    ]
    if missing:
        raise ValueError(f"{where}: config lacks {', '.join(missing)}")
    theta, yarn, mscale = _rope(raw, where)
    fields: dict[str, Any] = {name: int(raw.get(name) or 0) for name in counts}
    fields |= {name: float(raw[name]) for name in floats}
    config = DeepseekV32Config(**fields, rope_theta=theta, yarn=yarn, yarn_mscale=mscale)
    positive = [name for name in counts if name not in ("first_k_dense_replace", *_OPTIONAL)]
    check_positive(config, positive, where)
    _check_shapes(config, where)
    _check_layers(config, raw, where)
    return config


def _rope(raw: Mapping[str, Any], where: Path | str) -> tuple[float, Yarn | None, float]:
    """RoPE base, YaRN's rescaling of it, and YaRN's factor of the scores."""
    spelled = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = spelled.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ValueError(f"{where}: rope_theta is None; wanted a number")
    yarn = yarn_of(spelled, where, also=("mscale", "mscale_all_dim"))
    if yarn is None:
        return float(theta), None, 1.0
    mscale = spelled["mscale_all_dim"]
    if spelled["mscale"] != mscale:
        raise ValueError(
            f"{where}: mscale is {spelled['mscale']!r} and mscale_all_dim {mscale!r}; wanted equal "
            "values: phases of another length than 1 are not supported"
        )
    return float(theta), yarn, 0.1 * mscale * math.log(max(yarn.factor, 1.0)) + 1.0


def _check_shapes(config: DeepseekV32Config, where: Path | str) -> None:
    """Refuse sizes that contradict each other."""
    rope = config.qk_rope_head_dim
    if rope % 2 or not 0 < rope <= config.index_head_dim:
        raise ValueError(
            f"{where}: qk_rope_head_dim is {rope}; wanted an even number up to index_head_dim, "
            f"{config.index_head_dim}"
        )
    if config.n_group < 1 or config.n_routed_experts % config.n_group:
        raise ValueError(
            f"{where}: n_routed_experts {config.n_routed_experts} is not a multiple of n_group "
            f"{config.n_group}"
        )
    if not 0 < config.topk_group <= config.n_group:
        raise ValueError(
            f"{where}: topk_group is {config.topk_group}; wanted 1 to n_group, {config.n_group}"
        )
    reachable = config.topk_group * (config.n_routed_experts // config.n_group)
    if not 0 < config.num_experts_per_tok <= reachable:
        raise ValueError(
            f"{where}: num_experts_per_tok is {config.num_experts_per_tok}; wanted 1 to "
            f"{reachable}, the experts of topk_group groups"
        )


def _check_layers(config: DeepseekV32Config, raw: Mapping[str, Any], where: Path | str) -> None:
    """Refuse lists of layer kinds that say something else than the numbers."""
    kinds = sorted(set(raw.get("layer_types") or ()) - set(_SPARSE_ATTENTION))
    if kinds:
        raise ValueError(
            f"{where}: layer_types hold {', '.join(kinds)}, wanted {_SPARSE_ATTENTION[0]}"
        )
    dense = min(config.first_k_dense_replace, config.num_hidden_layers)
    wanted = ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense)
    found = raw.get("mlp_layer_types")
    if found is not None and list(found) != wanted:
        raise ValueError(
            f"{where}: mlp_layer_types is {found!r}; wanted {dense} dense layers "
            f"(first_k_dense_replace), then {config.num_hidden_layers - dense} sparse ones "
            "(num_hidden_layers in all)"
        )

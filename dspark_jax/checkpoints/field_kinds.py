"""What kind of value each field of a ``config.json`` holds, in whichever dialect it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Kind:
    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return type(value) is int


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(one) is kind for one in value)


_WHOLE = _Kind("a whole number", _whole)
_NUMBER = _Kind("a number", lambda value: type(value) in (int, float))
_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_WHOLES = _Kind("a list of whole numbers", _list_of(int))
_TEXTS = _Kind("a list of strings", _list_of(str))
_IDS = _Kind(
    "a whole number or a list of them", lambda value: _whole(value) or _WHOLES.holds(value)
)
_RATES = _Kind(
    "an object of whole numbers",
    lambda value: _OBJECT.holds(value) and all(map(_whole, value.values())),
)

_FIELDS = {
    _WHOLE: (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "o_groups", "v_head_dim"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim", "index_topk"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
        *("moe_intermediate_size", "moe_layer_freq", "first_k_dense_replace", "num_hash_layers"),
        *("hc_mult", "hc_sinkhorn_iters", "sliding_window", "num_nextn_predict_layers"),
        *("block_size", "mask_token_id", "num_target_layers", "markov_rank"),
        *("draft_vocab_size", "target_hidden_size"),
    ),
    _NUMBER: (
        *("rms_norm_eps", "routed_scaling_factor", "swiglu_limit", "hc_eps"),
        *("rope_theta", "compress_rope_theta", "partial_rotary_factor", "factor"),
        *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    _FLAG: (
        *("attention_bias", "mlp_bias", "tie_word_embeddings", "norm_topk_prob"),
        *("use_sliding_window", "sliding_window_non_causal", "sample_from_anchor"),
        *("enable_confidence_head", "confidence_head_with_markov"),
    ),
    _TEXT: (
        *("model_type", "hidden_act", "scoring_func", "topk_method", "rope_type", "type"),
        *("quant_method", "fmt", "markov_head_type"),
    ),
    _OBJECT: (
        *("rope_parameters", "rope_scaling", "main", "compress", "quantization_config"),
        *("dflash_config", "transformer_layer_config", "speculators_config"),
    ),
    _WHOLES: (
        *("compress_ratios", "weight_block_size", "target_layer_ids"),
        "aux_hidden_state_layer_ids",
    ),
    _TEXTS: ("layer_types", "mlp_layer_types", "architectures"),
    _IDS: ("eos_token_id", "pad_token_id"),
    _RATES: ("compress_rates",),
}
_KIND_OF = {name: kind for kind, names in _FIELDS.items() for name in names}


def check_kinds(raw: Mapping[str, Any], where: Path | str, inside: str = "") -> None:
    """Check the kind of every field that a reader of this package looks at.

    Fields that are absent, null or unknown are left alone; objects within are looked into.

    Args:
        raw: the parsed file, or an object in it.
        where: names the file in errors.
        inside: names that object in errors.

    Raises:
        ValueError: the first field that holds another kind of value than its name asks for.
    """
    for name, value in raw.items():
        kind = _KIND_OF.get(name)
        if kind is None or value is None:
            continue
        if not kind.holds(value):
            place = f"{name} of {inside}" if inside else name
            raise ValueError(f"{where}: {place} is {value!r}; wanted {kind.words}")
        if kind is _OBJECT:
            check_kinds(value, where, name)

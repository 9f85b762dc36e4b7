"""Targets from Hugging Face folders: what is read, and what is refused by name."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.checkpoints.target import dense_config
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.models.config import RopeScaling

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = json.loads((GOLDEN / "llama_tiny" / "config.json").read_text())
QWEN3 = json.loads((GOLDEN / "qwen3_tiny" / "config.json").read_text())
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writable copy of the tiny Llama."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "llama_tiny" / name, tmp_path / name)
    return tmp_path


def rewrite(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replace tensors, or drop those set to None."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def same_weights(found, wanted) -> bool:
    pairs = zip(found.layers, wanted.layers, strict=True)
    return (found.embed == wanted.embed).all() and all(
        (a.qkv == b.qkv).all() and (a.gate_up == b.gate_up).all() and (a.down == b.down).all()
        for a, b in pairs
    )


def test_a_config_is_read_field_by_field():
    config = dense_config(QWEN3, "here")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)
    assert (config.qk_norm, config.tie_word_embeddings) == (True, False)
    assert config.max_position_embeddings == 256


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_both_spellings_of_llama3_rope_are_read(spelling):
    raw = {key: value for key, value in LLAMA.items() if key != "rope_parameters"}
    rope = {**LLAMA3_ROPE, "rope_type": "llama3"}
    if spelling == "rope_parameters":
        raw["rope_parameters"] = {**rope, "rope_theta": 500_000.0}
    else:
        raw |= {"rope_theta": 500_000.0, "rope_scaling": rope}
    config = dense_config(raw, "here")
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(**LLAMA3_ROPE)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported; supported: llama, q"),
        ({"attention_bias": True}, "attention_bias is True, wanted false"),
        ({"mlp_bias": True}, "mlp_bias is True, wanted false"),
        ({"sliding_window": 512}, "sliding_window is 512, wanted none"),
        ({"layer_types": ["sliding_attention"]}, "layer_types hold sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' .*supported: default, ll"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "lacks factor, low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"vocab_size": None, "rms_norm_eps": None}, "config lacks vocab_size, rms_norm_eps"),
        ({"num_attention_heads": "x"}, "num_attention_heads is 'x'; wanted a whole number"),
        ({"hidden_size": 48.5}, r"hidden_size is 48\.5; wanted a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; wanted a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; wanted true or false"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; wanted a number"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; wanted an object"),
        (
            {"rope_parameters": {"rope_theta": 0}},
            "rope_theta is 0.0; wanted a finite number above 0",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3_ROPE, "factor": "8"}},
            "factor of rope_parameters is '8'; wanted a number",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0; wanted more than low_freq_factor, 1.0",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; wanted at least 1"),
        ({"head_dim": 7}, "head_dim is 7; wanted an even number"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of .* 4"),
    ],
)
def test_what_is_not_supported_is_named(changes, fault):
    with pytest.raises(ValueError, match=f"here: .*{fault}"):
        dense_config(LLAMA | changes, "here")


def test_a_qwen3_window_counts_only_when_it_is_switched_on():
    dense_config(QWEN3 | {"sliding_window": 512}, "here")
    with pytest.raises(ValueError, match="sliding_window is 512"):
        dense_config(QWEN3 | {"sliding_window": 512, "use_sliding_window": True}, "here")


def test_every_wrong_tensor_is_named_in_one_error(folder):
    rewrite(
        folder,
        {
            "model.norm.weight": None,
            "model.layers.2.mlp.up_proj.weight": None,
            "model.layers.0.mlp.down_proj.weight": np.zeros((48, 95), np.float32),
            "model.layers.0.self_attn.q_proj.bias": np.zeros(48, np.float32),
            "model.layers.3.input_layernorm.weight": np.zeros(48, np.float32),
        },
    )
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load_target(folder, "float32")
    message = str(caught.value)
    assert "missing tensors: model.layers.2.mlp.up_proj.weight, model.norm.weight" in message
    assert (
        "unknown tensors: model.layers.0.self_attn.q_proj.bias, "
        "model.layers.3.input_layernorm.weight" in message
    )
    assert "model.layers.0.mlp.down_proj.weight is [48, 95], wanted [48, 96]" in message


def test_an_untied_model_without_its_head_is_refused(folder):
    config = LLAMA | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.weight"):
        load_target(folder, "float32")


def test_a_stored_head_beside_a_tied_embedding_must_be_the_same_matrix(folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, {"lm_head.weight": embedding})
    assert load_target(folder, "float32").weights.lm_head is None
    rewrite(folder, {"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        load_target(folder, "float32")


def test_rope_buffers_of_old_checkpoints_are_not_weights(folder):
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    load_target(folder, "float32")


def test_a_sharded_folder_reads_like_a_single_file(folder, tmp_path):
    whole = load_target(GOLDEN / "llama_tiny", "float32").weights
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same_weights(load_target(folder, "float32").weights, whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"shards that are not there: b\.safetensors"):
        load_target(folder, "float32")


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_are_read_exactly(folder, stored):
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.astype(stored) for k, v in tensors.items()}, folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    embed = load_target(folder, "float32").weights.embed
    np.testing.assert_array_equal(embed, tensors[name].astype(stored).astype(np.float32))


def test_weights_come_in_the_dtype_asked(folder):
    weights = load_target(folder, jnp.bfloat16).weights
    assert weights.embed.dtype == weights.layers[0].qkv.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype float16 is not supported; supported: float32, bfl"):
        load_target(folder, jnp.float16)


def test_other_stored_dtypes_are_refused_by_name(folder):
    rewrite(folder, {"model.norm.weight": np.zeros(48, np.int8)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight is I8"):
        load_target(folder, "float32")


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        SafetensorsSource(tmp_path)

"""Targets from GGUF files, written here from the tiny reference models."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints.gguf_file import LAYER_NAMES, OUTER_NAMES
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.models import dense
from dspark_jax.models.config import RopeScaling
from dspark_jax.models.ragged import rectangle

GOLDEN = Path(__file__).parents[1] / "golden"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + E/2 of every head side by side, as Llama GGUF files store them."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    outer = {theirs: ours for ours, theirs in OUTER_NAMES.items()}
    if name in outer:
        return outer[name]
    inner = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
    _, _, index, tensor = name.removesuffix(".weight").split(".", 3)
    return f"blk.{index}.{inner[tensor]}.weight"


def write_gguf(
    path: Path,
    model: str,
    *,
    theta: float | None = None,
    metadata: Mapping[str, int | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """``model``'s golden folder as a GGUF file, with metadata and tensors added or left out."""
    folder = GOLDEN / model
    raw = json.loads((folder / "config.json").read_text())
    architecture = raw["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": raw["head_dim"],
    }
    for key, value in numbers.items():
        if key not in without:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", raw["rms_norm_eps"])
    writer.add_float32(
        f"{architecture}.rope.freq_base", theta or raw["rope_parameters"]["rope_theta"]
    )
    for key, value in (metadata or {}).items():
        full = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_uint32(full, value)
    for name, values in load_file(folder / "model.safetensors").items():
        if architecture == "llama" and "q_proj" in name:
            values = interleaved(values, raw["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            values = interleaved(values, raw["num_key_value_heads"])
        if gguf_name(name) not in without:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("model", ["llama_tiny", "qwen3_tiny"])
def test_a_gguf_file_gives_the_logits_of_the_folder_it_came_from(tmp_path, model):
    golden = load_file(GOLDEN / model / "golden.safetensors")
    target = load_target(write_gguf(tmp_path / "model.gguf", model), "float32")
    assert target.config == load_target(GOLDEN / model, "float32").config
    ids = jnp.asarray(golden["input_ids"], jnp.int32)
    batch = rectangle(ids, jnp.zeros(2, jnp.int32), jnp.full(2, ids.shape[1]))
    cache = dense.init_cache(target.config, 2, 48, jnp.float32)
    forward = jax.jit(dense.forward, static_argnums=0, static_argnames="taps")
    hidden, _, _ = forward(target.config, target.weights, cache, batch, taps=())
    logits = dense.unembed(target.config, target.weights, hidden).reshape(golden["logits"].shape)
    assert np.abs(logits - golden["logits"]).max() < 2e-4


def test_stop_ids_hold_the_end_of_text_and_the_end_of_turn(tmp_path):
    stops = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    file = write_gguf(tmp_path / "model.gguf", "llama_tiny", metadata=stops)
    target = load_target(file, "float32")
    assert target.stop_token_ids == (7, 9)
    assert target.text is None


def test_llama3_rope_factors_become_its_scaling(tmp_path):
    """The shortest wave keeps its length, the longest grows by the factor."""
    theta, factor = 500_000.0, 32.0
    wavelength = 2 * np.pi * theta ** (np.arange(0, 8, 2) / 8)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    assert (factors[0], factors[-1]) == (1.0, factor)
    file = write_gguf(
        tmp_path / "model.gguf", "llama_tiny", theta=theta, tensors={"rope_freqs.weight": factors}
    )
    config = load_target(file, "float32").config
    assert (config.rope_theta, config.rope_scaling) == (theta, RopeScaling(32.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"metadata": {"expert_count": 8}}, "expert_count is 8, wanted a dense model"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope.scaling.type is 'yarn'"),
        ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count is 4, wanted .* 8"),
        ({"metadata": {"attention.key_length": "8"}}, "attention.key_length is '8', wanted one"),
        ({"metadata": {"attention.head_count": 0}}, "num_attention_heads is 0; wanted at least 1"),
        ({"without": ("block_count",)}, "lacks the metadata llama.block_count"),
        ({"without": ("token_embd.weight",)}, "lacks token_embd.weight"),
        ({"without": ("blk.1.ffn_up.weight",)}, "missing tensors: model.layers.1.mlp.up_proj"),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(48, np.float32)}},
            r"unknown tensors: blk\.0\.attn_q\.bias",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.array([1, 2, 3, 9], np.float32)}},
            "rope_freqs.weight is not Llama 3's rescaling",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, fault):
    file = write_gguf(tmp_path / "model.gguf", "llama_tiny", **changes)
    with pytest.raises(ValueError, match=fault):
        load_target(file, "float32")


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'gemma3' is not supported; supported: llama, qwen3"):
        load_target(tmp_path / "other.gguf", "float32")


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        load_target(tmp_path / "model.gguf", "float32")

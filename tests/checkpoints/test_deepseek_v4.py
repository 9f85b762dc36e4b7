"""DeepSeek-V4 checkpoints: both spellings of a config, quantised tensors, and what is refused."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.deepseek_v4 import target_shapes
from dspark_jax.checkpoints.deepseek_v4_config import deepseek_v4_config
from dspark_jax.checkpoints.quantized import E2M1, dequantize_fp4, dequantize_fp8
from dspark_jax.checkpoints.resolve import load_target
from dspark_jax.models.deepseek_rope import Yarn
from dspark_jax.models.deepseek_v4.cache import init_cache
from dspark_jax.testing.deepseek_v4 import deepseek_fields, random_tensors, toy_config

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v4_tiny"
TRANSFORMERS = json.loads((GOLDEN / "config.json").read_text())
# Blocks of 128 do not divide these sizes, so the last blocks are smaller.
CONFIG = toy_config(
    hidden_size=160, moe_intermediate_size=96, num_hidden_layers=2, compress_ratios=(4, 0)
)
DEEPSEEK = deepseek_fields(CONFIG)
FP8, SCALE = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def quantize_fp8(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 numbers and a power of two for every block of 128 x 128."""
    rows, columns = (-(-size // 128) for size in numbers.shape)
    stored, scales = np.empty(numbers.shape, FP8), np.empty((rows, columns), SCALE)
    for row in range(rows):
        for column in range(columns):
            block = np.s_[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            scale = 2.0 ** np.ceil(np.log2(np.abs(numbers[block]).max() / 448))
            scales[row, column] = scale
            stored[block] = numbers[block] / scale
    return stored, scales


def quantize_fp4(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed e2m1 pairs and a power of two for every 32 columns of a row."""
    rows, columns = numbers.shape
    blocks = numbers.reshape(rows, -1, 32)
    scales = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=2) / 6))
    scaled = (blocks / scales[:, :, None]).reshape(rows, columns)
    codes = np.abs(scaled[:, :, None] - E2M1).argmin(axis=2).astype(np.uint8)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8), scales.astype(SCALE)


def is_fp8(name: str) -> bool:
    """What DeepSeek stores in fp8: projections of attention and indexer, the shared expert."""
    ends = ("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight")
    return "shared_experts" in name or (name.endswith(ends) and "compressor" not in name)


@pytest.fixture(scope="module")
def plain() -> dict[str, np.ndarray]:
    """Matrices whose neighbouring blocks differ in size, so that no scale fits two of them."""
    tensors = random_tensors(target_shapes(CONFIG), experts=CONFIG.n_routed_experts)
    for name, value in tensors.items():
        if value.ndim == 2 and name.endswith(".weight"):
            row, column = (np.arange(size) // 32 % 4 for size in value.shape)
            value *= np.float32(2.0) ** (row[:, None] + column)
    return tensors


@pytest.fixture(scope="module")
def quantized(plain) -> dict[str, np.ndarray]:
    stored = {}
    for name, value in plain.items():
        scale = None
        if ".experts." in name:
            stored[name], scale = quantize_fp4(value)
        elif is_fp8(name):
            stored[name], scale = quantize_fp8(value)
        else:
            stored[name] = value
        if scale is not None:
            stored[name.removesuffix("weight") + "scale"] = scale
    return stored


def write(path: Path, tensors: dict[str, np.ndarray], raw: dict = DEEPSEEK) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_deepseeks_spelling_of_a_config_is_read():
    assert deepseek_v4_config(DEEPSEEK, "here") == CONFIG
    assert CONFIG.compress_yarn == Yarn(4.0, 32, 32.0, 1.0)


FLASH = DEEPSEEK | {
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0] * 3,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "hc_mult": 4,
}


def test_the_shapes_of_v4_flash_are_those_of_284_billion_parameters():
    shapes = target_shapes(deepseek_v4_config(FLASH, "here"))
    assert round(sum(map(math.prod, shapes.values())) / 1e9) == 284


def test_a_token_of_v4_flash_takes_6880_bytes_and_a_request_23_megabytes_beside():
    config = deepseek_v4_config(FLASH, "here")
    cache = jax.eval_shape(lambda: init_cache(config, 1, 8192, jnp.bfloat16))
    compressed = [part for layer in cache.layers for part in (layer.compressed, layer.index)]
    entries = sum(part.entries.size * 2 for part in compressed if part is not None)
    assert entries / 8192 == 6880
    rows = sum(value.size * value.dtype.itemsize for value in jax.tree.leaves(cache.layers))
    assert round((rows - entries) / 1e6) == 23


def test_layers_of_a_drafter_at_the_end_of_the_ratios_are_not_the_targets():
    longer = DEEPSEEK | {"compress_ratios": [4, 0, 0, 0, 0]}
    assert deepseek_v4_config(longer, "here") == CONFIG


def test_transformers_spelling_of_a_config_is_read():
    config = deepseek_v4_config(TRANSFORMERS, "here")
    assert config.compress_ratios == (8, 4, 0, 4, 8)
    assert config.num_hash_layers == 2
    assert (config.rope_theta, config.compress_rope_theta) == (10_000.0, 160_000.0)
    assert config.compress_yarn is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"head_dim": None, "hc_eps": None}, "config lacks head_dim, hc_eps"),
        ({"index_topk": 2.5}, r"index_topk is 2\.5; wanted a whole number"),
        ({"sliding_window": 0}, "sliding_window is 0; wanted at least 1"),
        ({"o_groups": 0}, "o_groups is 0; wanted at least 1"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; wanted a finite number above 0"),
        (
            {"compress_rope_theta": 0},
            r"compress_rope_theta is 0\.0; wanted a finite number",
        ),
        ({"num_hash_layers": -1}, "num_hash_layers is -1; wanted 0 to 2, num_hidden_layers"),
        ({"swiglu_limit": "high"}, "swiglu_limit is 'high'; wanted a number"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, wanted 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', wanted 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2, wanted 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, wanted False"),
        ({"compress_ratios": None}, r"config lacks compress_ratios \(or layer_types\)"),
        ({"compress_ratios": [4]}, "compress_ratios names 1 layers, num_hidden_layers is 2"),
        ({"compress_ratios": [4, "x"]}, "wanted a list of whole numbers"),
        ({"compress_ratios": [4, 96]}, "compress_ratios contains 96; wanted 0 or a divisor of 256"),
        ({"num_hash_layers": None}, r"config lacks num_hash_layers \(or mlp"),
        ({"compress_rope_theta": None}, "compress_rope_theta is None; wanted a number"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' .*supported: default, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "lacks original_max_position_embeddings"),
        (
            {"rope_scaling": DEEPSEEK["rope_scaling"] | {"factor": 0}},
            "factor of yarn rope scaling is 0; wanted a finite number above 0",
        ),
        ({"qk_rope_head_dim": 10}, "qk_rope_head_dim is 10; wanted an even number up to .* 8"),
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, n_routed_experts is 4"),
    ],
)
def test_what_does_not_fit_a_config_is_named(changes, fault):
    with pytest.raises(ValueError, match=f"here: .*{fault}"):
        deepseek_v4_config(DEEPSEEK | changes, "here")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types hold full_attention"),
        ({"compress_rates": {}}, "compress_rates lacks compressed_sparse_attention, heavily"),
        (
            {"compress_rates": TRANSFORMERS["compress_rates"] | {"compressed_sparse_attention": 8}},
            "rate of compressed_sparse_attention is 8, wanted 4",
        ),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "first hash_moe, then moe"),
        (
            {"rope_parameters": {"main": {"rope_type": "yarn", "rope_theta": 1e4}}},
            "rope_type of main is 'yarn'",
        ),
    ],
)
def test_what_does_not_fit_transformers_spelling_is_named(changes, fault):
    with pytest.raises(ValueError, match=f"here: .*{fault}"):
        deepseek_v4_config(TRANSFORMERS | changes, "here")


def test_every_e2m1_code_and_the_order_of_its_pairs():
    stored = np.array([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], np.uint8).view(np.int8)
    found = dequantize_fp4(stored, np.array([[0.5], [2.0]], SCALE))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(found, [values / 2, -2 * values])


def test_fp8_scales_belong_to_blocks_of_128_by_128():
    scales = np.array([[1, 2, 4], [8, 16, 32]], SCALE)
    found = dequantize_fp8(np.ones((130, 300), FP8), scales)
    for row, column in ((0, 0), (127, 127), (127, 128), (129, 255), (128, 256), (0, 299)):
        assert found[row, column] == scales[row // 128, column // 128]


def test_quantised_tensors_load_as_the_numbers_they_stand_for(plain, quantized, tmp_path):
    """To the bit also in bfloat16: both formats fit into it."""
    path = write(tmp_path, quantized)
    full, half = (load_target(path, dtype).weights for dtype in ("float32", "bfloat16"))
    dtypes = {value.dtype for value in jax.tree.leaves(half)}
    assert dtypes == {jnp.dtype(kind) for kind in (jnp.bfloat16, jnp.float32, jnp.int32)}
    layer = full.layers[0]
    for found, name in (
        (layer.attention.query_b, "layers.0.attn.wq_b.weight"),
        (layer.attention.indexer.query, "layers.0.attn.indexer.wq_b.weight"),
        (layer.moe.shared_down, "layers.0.ffn.shared_experts.w2.weight"),
        (layer.moe.experts.gate_up[3, :96], "layers.0.ffn.experts.3.w1.weight"),
        (layer.moe.experts.gate_up[3, 96:], "layers.0.ffn.experts.3.w3.weight"),
        (layer.moe.experts.down[1], "layers.0.ffn.experts.1.w2.weight"),
    ):
        wanted = plain[name]
        error = np.abs(found - wanted).max() / np.abs(wanted).max()
        # half a step at the top of the range, over the least that a block's largest number takes:
        # 1 of 3 in e2m1, 16 of 224 in e4m3
        assert 1e-3 < error < (0.34 if ".experts." in name else 0.072), name
    np.testing.assert_array_equal(half.layers[0].attention.kv, layer.attention.kv)
    np.testing.assert_array_equal(half.layers[0].moe.experts.down, layer.moe.experts.down)
    np.testing.assert_array_equal(full.layers[1].attention.sink, plain["layers.1.attn.attn_sink"])


def test_fp32_scales_of_fp8_blocks_are_read_too(quantized, tmp_path):
    name = "layers.0.attn.wkv.scale"
    wide = quantized | {name: quantized[name].astype(np.float32)}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found, wanted = (
        load_target(write(tmp_path / sub, tensors), "float32").weights.layers[0].attention.kv
        for sub, tensors in (("a", wide), ("b", quantized))
    )
    np.testing.assert_array_equal(found, wanted)


def test_both_spellings_of_tensor_names_are_read():
    weights = load_target(GOLDEN, "float32").weights
    stored = load_file(GOLDEN / "model.safetensors")
    np.testing.assert_array_equal(weights.embed, stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.stream_head.fn, stored["model.hc_head.hc_fn"])
    kv_norm = stored["model.layers.1.attn.norm.weight"]
    np.testing.assert_array_equal(weights.layers[1].attention.kv_norm, kv_norm)


def test_every_wrong_tensor_is_named_in_one_error(quantized, tmp_path):
    tensors = dict(quantized)
    del tensors["layers.1.ffn.gate.bias"]
    del tensors["layers.0.attn.wq_a.scale"]
    tensors["layers.0.ffn.experts.0.w2.scale"] = np.ones((160, 2), SCALE)
    tensors["layers.0.ffn.gate.scale"] = np.ones((1, 2), SCALE)
    tensors["layers.1.attn.compressor.ape"] = np.zeros((4, 32), np.float32)
    tensors["layers.0.attn.wkv.weight"] = np.zeros((16, 159), FP8)
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load_target(write(tmp_path, tensors), "float32")
    message = str(caught.value)
    assert "missing tensors: layers.0.attn.wq_a.scale, layers.1.ffn.gate.bias;" in message
    assert "unknown tensors: layers.0.ffn.gate.scale, layers.1.attn.compressor.ape;" in message
    assert "layers.0.attn.wkv.weight is [16, 159], wanted [16, 160]" in message
    assert "layers.0.ffn.experts.0.w2.scale is [160, 2], wanted [160, 3]" in message


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("norm.weight", np.ones(160, np.int8), r"norm\.weight is I8, wanted F32 or BF16 or F16"),
        ("layers.0.ffn.gate.tid2eid", np.zeros((64, 2), np.float32), "tid2eid is F32, wanted I64"),
        ("layers.0.attn.wkv.scale", np.ones((1, 2), np.int8), "wkv.scale is I8, wanted F8_E8M0"),
    ],
)
def test_a_dtype_that_a_tensor_must_not_have_is_named(quantized, tmp_path, name, value, fault):
    with pytest.raises(ValueError, match=fault):
        load_target(write(tmp_path, quantized | {name: value}), "float32")


def test_a_table_that_names_an_expert_that_is_none_is_refused(plain, tmp_path):
    name = "layers.0.ffn.gate.tid2eid"
    table = plain[name].copy()
    table[5, 1] = CONFIG.n_routed_experts
    with pytest.raises(ValueError, match="tid2eid holds 4; wanted 0 to 3"):
        load_target(write(tmp_path, plain | {name: table}), "float32")


def test_a_tensor_under_two_names_is_refused(plain, tmp_path):
    twice = plain | {"model.norm.weight": plain["norm.weight"]}
    with pytest.raises(ValueError, match=r"holds norm\.weight twice: as "):
        load_target(write(tmp_path, twice), "float32")


def test_tensors_of_a_drafter_in_the_same_file_are_left_alone(plain, tmp_path):
    both = plain | {"mtp.0.main_norm.weight": np.ones(160, np.float32)}
    load_target(write(tmp_path, both), "float32")

"""DeepSeek-V3.2 checkpoints: two layouts of names, fp8 with block scales, and what is refused."""

import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.deepseek_v32 import hugging_face_name, target_shapes
from dspark_jax.checkpoints.deepseek_v32_config import deepseek_v32_config
from dspark_jax.checkpoints.resolve import load_target

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek_v32_tiny"
RAW = json.loads((GOLDEN / "config.json").read_text())
TENSORS = load_file(GOLDEN / "model.safetensors")
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def load(where, dtype="float32", **options):
    return load_target(where, dtype, **options)


def folder(tmp_path, tensors, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**RAW, **changes}))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def same_weights(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found.weights, wanted.weights)


def by_deepseek_names(tensors):
    config = deepseek_v32_config(RAW, "")
    return {name: tensors[hugging_face_name(name)] for name in target_shapes(config)}


def test_both_layouts_of_names_load_the_same_weights(tmp_path):
    renamed = by_deepseek_names(TENSORS)
    assert len(renamed) == len(TENSORS)
    assert {
        "embed.weight",
        "layers.0.attn.wkv_a.weight",
        "layers.1.ffn.gate.bias",
        "layers.2.ffn.experts.7.w3.weight",
        "layers.2.attn.indexer.k_norm.bias",
    } < set(renamed)
    same_weights(load(folder(tmp_path, renamed)), load(GOLDEN))


def test_router_and_head_weights_of_the_indexer_stay_fp32():
    weights = load(GOLDEN, "bfloat16").weights
    narrow = {leaf.dtype.name for leaf in jax.tree.leaves(weights.layers[0].ffn)}
    assert narrow == {"bfloat16"}
    moe, indexer = weights.layers[1].ffn, weights.layers[1].attention.indexer
    for leaf in (moe.router, moe.bias, *jax.tree.leaves(indexer)):
        assert leaf.dtype == "float32"


def test_layers_can_be_left_on_the_disk():
    lent = load(GOLDEN, layers=False).weights
    assert lent.layers == ()
    np.testing.assert_array_equal(lent.head, TENSORS["lm_head.weight"])


def in_fp8(tensors, names, scale_dtype=np.float32, suffix=".weight_scale_inv"):
    """The tensors with some matrices in fp8, blocks of 128 x 128; and what they now mean."""
    stored, plain = dict(tensors), dict(tensors)
    for index, name in enumerate(names):
        matrix = tensors[name + ".weight"]
        blocks = [-(-size // 128) for size in matrix.shape]
        exponents = -10 + np.arange(blocks[0] * blocks[1]).reshape(blocks) + index
        scale = np.exp2(exponents.astype(np.float32))
        wide = np.kron(scale, np.ones((128, 128)))[: matrix.shape[0], : matrix.shape[1]]
        numbers = (matrix / wide).astype(ml_dtypes.float8_e4m3fn)
        stored[name + ".weight"] = numbers
        stored[name + suffix] = scale.astype(scale_dtype)
        plain[name + ".weight"] = (numbers.astype(np.float32) * wide).astype(np.float32)
    return stored, plain


WIDE_MLP = {"intermediate_size": 300}


def with_wide_mlp():
    """Tensors whose first MLP is larger than a block, and no multiple of it."""
    random, mlp = np.random.default_rng(0), "model.layers.0.mlp."
    return TENSORS | {
        f"{mlp}gate_proj.weight": random.normal(size=(300, 64)).astype(np.float32),
        f"{mlp}up_proj.weight": random.normal(size=(300, 64)).astype(np.float32),
        f"{mlp}down_proj.weight": random.normal(size=(64, 300)).astype(np.float32),
    }


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_fp8_matrices_are_dequantised_block_by_block(tmp_path, scale_dtype):
    names = [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.experts.3.up_proj",
        "model.layers.2.self_attn.kv_b_proj",
        "model.layers.2.self_attn.indexer.wq_b",
    ]
    stored, plain = in_fp8(with_wide_mlp(), names, scale_dtype)
    (tmp_path / "fp8").mkdir()
    (tmp_path / "plain").mkdir()
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    found = folder(tmp_path / "fp8", stored, quantization_config=quantization, **WIDE_MLP)
    same_weights(load(found), load(folder(tmp_path / "plain", plain, **WIDE_MLP)))


def test_fp8_under_deepseeks_names(tmp_path):
    stored, plain = in_fp8(by_deepseek_names(TENSORS), ["layers.1.attn.wo"], suffix=".scale")
    (tmp_path / "fp8").mkdir()
    (tmp_path / "plain").mkdir()
    same_weights(
        load(folder(tmp_path / "fp8", stored)),
        load(folder(tmp_path / "plain", plain)),
    )


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    tensors = dict(TENSORS)
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    tensors["model.layers.2.self_attn.indexer.wk.weight"] = np.zeros((4, 64), np.float32)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = np.zeros((32, 64), np.float32)
    stored, _ = in_fp8(tensors, ["model.layers.1.self_attn.o_proj"])
    del stored["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    with pytest.raises(ValueError, match="does not fit its config") as error:
        load(folder(tmp_path, stored))
    for part in (
        "missing tensors: model.layers.1.mlp.gate.e_score_correction_bias, "
        "model.layers.1.self_attn.o_proj.weight_scale_inv",
        "unknown tensors: model.layers.0.mlp.experts.0.up_proj.weight",
        "misshapen tensors: model.layers.2.self_attn.indexer.wk.weight is [4, 64], wanted [16, 64]",
    ):
        assert part in str(error.value)


def test_a_dtype_in_the_wrong_place_is_named(tmp_path):
    tensors = dict(TENSORS)
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"{name} is F8_E4M3, wanted F32"):
        load(folder(tmp_path, tensors))


def test_a_multi_token_head_is_ignored_only_where_the_config_says_so(tmp_path):
    tensors = TENSORS | {"model.layers.3.eh_proj.weight": np.zeros((64, 128), np.float32)}
    (tmp_path / "with").mkdir()
    said = folder(tmp_path / "with", tensors, num_nextn_predict_layers=1)
    same_weights(load(said), load(GOLDEN))
    with pytest.raises(ValueError, match=r"unknown tensors: model\.layers\.3\.eh_proj\.weight"):
        load(folder(tmp_path, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": None}, "config lacks index_topk"),
        ({"kv_lora_rank": "32"}, "kv_lora_rank is '32'; wanted a whole number"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor is '2'; wanted a number"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', wanted 'sigmoid'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, wanted False"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, wanted True"),
        ({"index_topk": 0}, "index_topk is 0; wanted at least 1"),
        ({"v_head_dim": 0}, "v_head_dim is 0; wanted at least 1"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32; wanted an even number up to"),
        ({"n_group": 3}, "n_routed_experts 8 is not a multiple of n_group 3"),
        ({"topk_group": 3}, "topk_group is 3; wanted 1 to n_group, 2"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; wanted 1 to 4"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types hold full_attention"),
        ({"mlp_layer_types": ["sparse"] * 3}, "wanted 1 dense layers"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta is None; wanted a number"),
        ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "linear"}}, "rope_type 'linear'"),
        (
            {"rope_parameters": {"rope_theta": 1.0, "rope_type": "yarn", "factor": 40}},
            "yarn rope scaling lacks original_max_position_embeddings, beta_fast, beta_slow",
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1.0, "beta_fast": -1}},
            "beta_fast of yarn rope scaling is -1; wanted a finite number above 0",
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1.0, "mscale": 0.7}},
            r"mscale is 0\.7 and mscale_all_dim 1\.0; wanted equal",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
            r"weight_block_size of quantization_config is \[1, 128\]",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .* is 'awq'"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(changes, message):
    with pytest.raises(ValueError, match=rf"somewhere: .*{message}"):
        deepseek_v32_config({**RAW, **changes}, "somewhere")


def test_yarn_stretches_positions_and_sharpens_scores():
    """V3.2's own numbers: 0.1 ln 40 + 1, squared, over the root of the head width."""
    scaled = {**RAW, "rope_parameters": None, "rope_scaling": YARN, "rope_theta": 10_000}
    config = deepseek_v32_config(scaled, "")
    assert config.yarn is not None
    assert config.yarn.factor == 40
    assert config.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 * 24**-0.5)
    assert deepseek_v32_config(RAW, "").softmax_scale == pytest.approx(24**-0.5)

"""`dspark check` on the recorded folders, sound and spoiled."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.cli.check import check
from dspark_jax.cli.check_choices import absolute_where, decided
from dspark_jax.cli.check_rows import absolute, identical, relative
from dspark_jax.cli.main import main

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize(
    ("folder", "tensors"),
    [
        ("llama_tiny", ["hidden_states[3]", "logits", "greedy"]),
        ("qwen3_tiny", ["hidden_states[4]", "logits", "greedy"]),
        ("deepseek_v32_tiny", ["hidden_states[3]", "logits"]),
        ("deepseek_v4_tiny", ["logits", "greedy"]),
        ("dspark_vanilla", ["loss", "tau_probabilistic", "accept_rate@6", "round1.tokens"]),
        ("dspark_gated", ["draft_logits", "eval_mask", "round0.block_hidden"]),
        ("dspark_rnn", ["aligned_target_logits", "round1.corrected_logits"]),
        ("dflash_rank0", ["target_ids", "confidence_loss", "round1.confidence_logits"]),
        ("speculators_pruned", ["block_hidden", "base_logits", "draft_logits"]),
        ("speculators_full", ["confidence_logits"]),
    ],
)
def test_recorded_folders_agree(folder, tensors, capsys):
    assert check(GOLDEN / folder) == 0
    printed = capsys.readouterr().out
    for name in tensors:
        assert f" {name} " in printed
    assert "DIFFERS" not in printed


def spoiled_copy(folder, tmp_path, name, change):
    shutil.copytree(GOLDEN / folder, tmp_path / folder)
    file = tmp_path / folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file)
    return tmp_path / folder


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("dspark_gated", "confidence_head.proj.bias"),
        ("speculators_full", "markov_head.gate_proj.bias"),
        ("qwen3_tiny", "model.layers.3.self_attn.k_norm.weight"),
    ],
)
def test_a_slightly_wrong_weight_fails(folder, name, tmp_path, capsys):
    path = spoiled_copy(folder, tmp_path, name, lambda value: value + np.float32(0.01))
    target = str(GOLDEN / "qwen3_tiny") if folder == "speculators_full" else None
    assert check(path, target) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "file", "content", "message"),
    [
        ("dspark_gated", "golden_metrics.json", b"{}", "golden_metrics.json lacks"),
        ("dspark_gated", "golden_metrics.json", b"{", "is not readable JSON"),
        ("llama_tiny", "golden.safetensors", b"xxxxxxxxxx", "is not a readable safetensors file"),
    ],
)
def test_a_damaged_recording_is_named(folder, file, content, message, tmp_path, capsys):
    shutil.copytree(GOLDEN / folder, tmp_path / folder)
    (tmp_path / folder / file).write_bytes(content)
    assert main(["check", str(tmp_path / folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert file in error


def test_a_missing_recording_is_named(tmp_path, capsys):
    shutil.copytree(GOLDEN / "llama_tiny", tmp_path / "llama_tiny")
    file = tmp_path / "llama_tiny" / "golden.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "logits"}, file)
    assert main(["check", str(tmp_path / "llama_tiny")]) == 2
    assert "golden.safetensors lacks logits, it holds" in capsys.readouterr().err


def test_a_model_type_that_is_not_supported_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert main(["check", str(tmp_path)]) == 2
    assert "model_type 'mamba' is not supported" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_a_target_is_not_held_against_another(capsys):
    llama = str(GOLDEN / "llama_tiny")
    assert main(["check", llama, "--target", llama]) == 2
    assert "holds a target itself; wanted a drafter or a recorded text" in capsys.readouterr().err


def test_a_drafter_is_held_against_the_target_it_is_given(capsys):
    assert (
        main(["check", str(GOLDEN / "dspark_gated"), "--target", str(GOLDEN / "llama_tiny")]) == 2
    )
    printed = capsys.readouterr().err
    assert "the target has" in printed


def test_nan_and_other_shapes_never_agree():
    assert absolute("x", [1.0, 2.0], [1.0, 2.0]).agrees
    assert not absolute("x", [1.0, np.nan], [1.0, 2.0]).agrees
    assert not absolute("x", [1.0], [1.0, 2.0]).agrees
    assert absolute("x", [1.0, np.nan], [1.0, 2.0], [True, False]).agrees
    assert not relative("x", [1.0001], [1.0]).agrees
    assert relative("x", [0.0], [0.0]).agrees
    assert identical("x", [1, 2], [1, 3]).error == 1
    assert not identical("x", [1, 2], [1, 2, 3]).agrees


def test_positions_after_a_tie_are_decided_only_in_the_layer_that_tied():
    """A layer passes a tie at position 2 on to that position alone, the next one to all later."""
    margins = np.full((2, 1, 5), 0.5)
    margins[0, 0, 2] = 0
    clear = decided(margins)[:, 0]
    np.testing.assert_array_equal(clear[0], [True] * 5)
    np.testing.assert_array_equal(clear[1], [True, True, False, True, True])
    np.testing.assert_array_equal(clear[2], [True, True, False, False, False])


def test_undecided_positions_are_left_out_and_counted():
    found, wanted = np.zeros((1, 3, 2)), np.array([[[0, 0], [9, 9], [0, 0]]])
    row = absolute_where("x", found, wanted, np.array([[True, False, True]]))
    assert row.agrees
    assert row.measure == "absolute, 2 of 3 positions"
    assert not absolute_where("x", found, wanted, np.ones((1, 3), bool)).agrees
    with pytest.raises(ValueError, match="x has no position that the model decides"):
        absolute_where("x", found, wanted, np.zeros((1, 3), bool))

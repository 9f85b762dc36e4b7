"""The decode step of a DeepSeek-V4 shape: what is measured, compared and refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.deepseek_pair import FLASH, TINY, chance_blocks, random_weights
from benchmarks.deepseek_step import (
    KERNELS,
    LABEL,
    PLAIN,
    Cell,
    Program,
    cells,
    compare,
    main,
    measure,
    needed_bytes,
    part_ms,
    step_config,
)
from dspark_jax.decode.config import Shape


def test_figures_share_their_programs():
    found = cells(("kernels", "windows", "widths"), FLASH, (8, 64), 4096, (2.0, 3.0), ())
    names = [tuple(cell.names.values()) for cell in found]
    assert len(names) == len(set(names))
    full = [one for one in found if one.mode == "static" and one.rows == 6 * one.users]
    shared = [one for one in full if one.implementation == KERNELS]
    assert [one.figures for one in shared] == [("kernels", "windows", "widths")] * 2
    assert all(one.profiled for one in full)
    compact = [one for one in found if one.mode == "compact"]
    assert [one.rows for one in compact] == [128, 16, 192, 24]


def test_other_contexts_are_compared_as_well():
    found = cells(("contexts",), FLASH, (8,), 4096, (), (1024, 65536))
    assert [(one.context, one.implementation) for one in found] == [
        (1024, KERNELS),
        (1024, PLAIN),
        (65536, KERNELS),
        (65536, PLAIN),
    ]


def test_memory_grows_with_context_and_pure_jax_takes_more():
    kernels, plain = cells(("contexts",), FLASH, (64,), 0, (), (4096,))
    longer = cells(("contexts",), FLASH, (64,), 0, (), (65536,))[0]
    least, more = needed_bytes(kernels, FLASH), needed_bytes(longer, FLASH)
    assert least["weights"] == more["weights"]
    # entries of a CSA layer, its index keys, entries of an HCA layer in bf16; places of pages
    row = 2 * (512 / 4 + 128 / 4 + 512 / 128) + 4 / 256
    assert more["state"] - least["state"] == 64 * (65536 - 4096) * row
    assert needed_bytes(plain, FLASH)["step"] > least["step"]


def test_what_does_not_fit_is_refused_by_part_before_anything_is_drawn():
    with pytest.raises(ValueError, match=r"256 users .* need about .* GiB \(weights .*gives 8\.0"):
        main(memory_gib=8.0, users=(256,))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shape": "v5"}, "shape is 'v5'; wanted one of v4-flash, tiny"),
        ({"windows": (7.0,)}, r"windows are \(7\.0,\); wanted numbers from 1 to 6"),
        ({"users": (0,)}, "users holds 0; wanted 1 or more"),
        ({"experts": 2}, "experts is 2; wanted 6 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        main(**options)


def test_accepted_drafts_are_as_likely_as_the_confidences_say():
    logits, accepted = chance_blocks(4000, 3)
    said = 1 / (1 + 2.718281828 ** -logits[:, 0])
    assert abs(float((accepted > 0).mean() - said.mean())) < 0.02


def arm(mode="static", window=6.0, implementation=KERNELS, **figures):
    names = {"mode": mode, "users": 8, "context": 64, "mean_window": window}
    return names | {"implementation": implementation} | figures


def test_arms_are_compared_to_those_that_differ_in_one_thing():
    mine = {"sparse_attention": 1.0, "top_k": 1.0, "draft/sparse_attention": 5.0, "head": 1.0}
    theirs = {"sparse_attention": 5.0, "top_k": 3.0, "draft/sparse_attention": 9.0, "head": 1.0}
    arms = [
        arm(step_ms=10.0, tokens_per_second=100.0, parts_ms=mine),
        arm(step_ms=20.0, tokens_per_second=50.0, parts_ms=theirs, implementation=PLAIN),
        arm("compact", 2.0, step_ms=5.0, tokens_per_second=130.0),
        arm("compact", 3.0, error="failed"),
    ]
    assert part_ms(arms[0], "draft") == 5.0
    compare(arms)
    assert arms[0]["share_of_plain"] == {
        "step": 0.5,
        "sparse_attention": 0.2,
        "top_k": pytest.approx(1 / 3),
        "sparse parts": 0.25,
    }
    assert "share_of_plain" not in arms[1]
    assert arms[2]["ratio_to_static"] == 1.3
    assert arms[2]["step_share_of_static"] == 0.5


def test_a_compact_cell_verifies_its_rows_and_walks_whole_blocks():
    (_, compact) = cells(("windows",), TINY, (2,), 32, (2.0,), ())
    assert step_config(compact, TINY).shape == Shape(depth=TINY.block_size, rows=4)


def drawn_on_the_host(shapes):
    """Weights of these shapes: a generator on the device is a program for every shape."""
    random = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            values = np.arange(leaf.size) % leaf.shape[-1]  # experts of a token are distinct
        else:
            values = random.normal(scale=0.2, size=leaf.size)
        return jnp.asarray(values.reshape(leaf.shape), leaf.dtype)

    return jax.tree.map(draw, shapes)


@pytest.mark.slow
def test_a_step_of_windows_of_one_row_commits_a_token_of_each_request():
    target = dataclasses.replace(TINY.target, num_hidden_layers=1, compress_ratios=(4,))
    pair = dataclasses.replace(TINY, target=target, target_layer_ids=(0,))
    shapes = jax.eval_shape(lambda: random_weights(pair))
    program = Program(Cell(("widths",), 2, 32, 2, "off", 1), pair, drawn_on_the_host(shapes))
    figures = measure(program, program.compile())
    assert figures["step_ms"] > 0
    assert figures["tokens_per_step"] == 2


def test_what_there_was_no_time_for_is_told_under_the_label_and_nothing_measured_fails(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("benchmarks.deepseek_step.random_weights", lambda pair: ())
    path = tmp_path / "step.json"
    options = {"shape": "tiny", "figures": ("windows",), "users": (2,), "context": 32}
    assert main(**options, seconds=0.0, output=path) == 1
    written = json.loads(path.read_text())
    assert written["simulation"].startswith(LABEL)
    assert [one["left_out"] for one in written["arms"]] == ["out of time"] * 3
    told = capsys.readouterr().out
    assert LABEL in told
    assert "FAILED: nothing was measured" in told

"""Strict configs: what is shipped reads, what is wrong is named."""

from pathlib import Path

import pytest

from train.config import TrainConfig, from_table, read_config
from train.data_config import DataConfig
from train.evaluate_config import EvaluateConfig

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = (CONFIGS / "tiny.toml").read_text()


def changed(tmp_path, before, after):
    assert before in TINY
    path = tmp_path / "run.toml"
    path.write_text(TINY.replace(before, after))
    return path


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m-dspark", "smollm2-135m-dflash"])
def test_shipped_configs_read(name):
    read_config(CONFIGS / f"{name}.toml", TrainConfig)


@pytest.mark.parametrize("name", ["smollm2-135m-data-prompts", "smollm2-135m-data-self"])
def test_shipped_data_configs_read(name):
    read_config(CONFIGS / f"{name}.toml", DataConfig)


def test_the_shipped_evaluation_config_reads():
    read_config(CONFIGS / "smollm2-135m-evaluate.toml", EvaluateConfig)


def test_dflash_differs_from_dspark_only_in_its_head_and_output():
    dspark = read_config(CONFIGS / "smollm2-135m-dspark.toml", TrainConfig)
    dflash = read_config(CONFIGS / "smollm2-135m-dflash.toml", TrainConfig)
    assert dflash.drafter.markov_rank == 0
    assert (dflash.target, dflash.data, dflash.loss) == (dspark.target, dspark.data, dspark.loss)
    assert dflash.training.steps == dspark.training.steps


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps = 12", "stepz = 12", "unknown key 'stepz'; known are .*steps"),
        ("steps = 12", "", "training: missing key 'steps'"),
        ("steps = 12", 'steps = "12"', "steps is '12', a str; wanted int"),
        ("steps = 12", "steps = true", "steps is True, a bool; wanted int"),
        ("steps = 12", "steps = 0", "training.steps is 0; it must be at least 1"),
        ("[drafter]", "[draft]", "unknown key 'draft'"),
        ("[0, 1]", '[0, "1"]', r"target_layer_ids\[1\] is '1'"),
        ("[0, 1]", "1", "target_layer_ids is 1; wanted a list"),
        ('dtype = "float32"', 'dtype = "float16"', "'float16'; wanted one of bfloat16, float32"),
        ("anchor_chunk = 4", "anchor_chunk = 3", "anchor_chunk 3 does not divide"),
        ("num_anchors = 8", "num_anchors = 32", "num_anchors 32 must be below"),
        ("steps = 12", "steps = ", "is not valid TOML"),
        ("steps = 12", "steps = 12\nseed = -1", "training.seed is -1; it must be at least 0"),
        ("steps = 12", "steps = 12\nlearning_rate = nan", "learning_rate is nan; it must be above"),
        ("steps = 12", "steps = 12\nlearning_rate = -1", "learning_rate is -1.0; it must be above"),
        ("[training]", "[loss]\ndecay = 0\n[training]", "loss.decay is 0.0; it must be above 0"),
        ("[training]", "[loss]\nalpha_l1 = inf\n[training]", "loss.alpha_l1 is inf; it must be 0"),
    ],
)
def test_a_wrong_config_is_an_error_that_says_what(tmp_path, before, after, message):
    with pytest.raises(ValueError, match=message):
        read_config(changed(tmp_path, before, after), TrainConfig)


def test_whole_numbers_pass_as_floats():
    table = {"decay": 4, "alpha_ce": 1}
    config = from_table(table, TrainConfig.__dataclass_fields__["loss"].default_factory, "loss")
    assert (config.decay, type(config.alpha_ce)) == (4.0, float)

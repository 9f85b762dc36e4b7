"""`dspark data` from the command line: data, features, resumption, and wrong configs."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_jax.checkpoints import resolve
from dspark_jax.cli.main import main
from dspark_jax.text.chat_template import ChatTemplate
from dspark_jax.text.text import Text
from train.feature_cache import FeatureCache
from train.shards import read_dataset
from train.stopping import Stopped

TEMPLATE = "{% for m in messages %}{{ 'u ' + m['content'] + ' e ' }}{% endfor %}a"


@pytest.fixture
def config(tmp_path, monkeypatch, request):
    """Three prompts for the tiny Llama, which gets a vocabulary of words."""
    real = resolve.load_target

    def load(name, dtype):
        loaded = real(request.path.parents[1] / "golden" / "llama_tiny", dtype)
        words = ["u", "a", "e", *(f"w{i}" for i in range(157))]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "u"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        text = Text(tokenizer, ChatTemplate(TEMPLATE, {}, "test"))
        return type(loaded)(loaded.config, loaded.weights, text, (2,), name)

    monkeypatch.setattr(resolve, "load_target", load)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"w{i}"]}) + "\n" for i in range(3)))
    path = tmp_path / "data.toml"
    path.write_text(
        f"""
        [target]
        name = "tiny"
        dtype = "float32"
        [prompts]
        files = ["{prompts}"]
        [answers]
        output = "{tmp_path / "data"}"
        max_new_tokens = 5
        max_context = 16
        [features]
        output = "{tmp_path / "cache"}"
        target_layer_ids = [0]
        """
    )
    return path


def test_a_job_estimates_writes_tokens_and_features_and_is_not_begun_twice(
    config, tmp_path, capsys
):
    assert main(["data", str(config), "--estimate"]) == 0
    told = capsys.readouterr().out
    assert "estimate: 3 conversations" in told
    assert "of features" in told
    assert main(["data", str(config)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["data", str(config), "--resume"]) == 0
    assert len(read_dataset(tmp_path / "data")) == 3
    assert len(FeatureCache(tmp_path / "cache")) == 3
    # a finished job has nothing left to do
    assert main(["data", str(config), "--resume"]) == 0
    assert len(FeatureCache(tmp_path / "cache")) == 3


@pytest.mark.parametrize("code", [130, 143])
def test_a_stopped_job_says_how_to_go_on_and_exits_with_the_signals_code(
    config, capsys, monkeypatch, code
):
    def stopped(*_, **__):
        raise Stopped(code)

    monkeypatch.setattr("train.answers.build_dataset", stopped)
    assert main(["data", str(config)]) == code
    assert f"dspark data {config} --resume" in capsys.readouterr().out


def test_a_wrong_key_is_one_line_of_error(config, capsys):
    config.write_text(config.read_text().replace("max_context", "context"))
    assert main(["data", str(config)]) == 2
    assert "unknown key 'context'" in capsys.readouterr().err


def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(config, tmp_path, capsys):
    config.write_text(config.read_text().replace("[0]", "[7]"))
    assert main(["data", str(config)]) == 2
    assert "target_layer_ids holds 7" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()

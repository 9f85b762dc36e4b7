"""A tiny target, tiny data, a tiny run, and recorded training forwards of the reference."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark_jax.checkpoints.drafter_config import drafter_config
from dspark_jax.checkpoints.drafter_deepspec import read_deepspec
from dspark_jax.checkpoints.drafter_tensors import DrafterTensors
from dspark_jax.checkpoints.resolve import LoadedTarget, load_target
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.weights import DrafterWeights
from dspark_jax.text.chat_template import ChatTemplate
from dspark_jax.text.text import Text
from train.config import TrainConfig, read_config
from train.data import supervised_answer
from train.forward import Sequences
from train.shards import write_manifest, write_shard

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A reference drafter with the inputs and outputs of one training forward."""

    config: DrafterConfig
    weights: DrafterWeights
    batch: Sequences
    tensors: dict[str, Any]
    metrics: dict[str, tuple[float, float | None]]


def read_recorded(name: str) -> Recorded:
    folder = GOLDEN / name
    config = drafter_config(json.loads((folder / "config.json").read_text()), folder)
    tensors = jax.device_put(load_file(folder / "golden.safetensors"))
    return Recorded(
        config=config,
        weights=read_deepspec(config, DrafterTensors(SafetensorsSource(folder), folder), None),
        batch=Sequences(
            tokens=tensors["input_ids"].astype(jnp.int32),
            loss_mask=tensors["loss_mask"] > 0,
            taps=tensors["target_hidden_states"],
            last_hidden=tensors["target_last_hidden_states"],
        ),
        tensors=tensors,
        metrics=json.loads((folder / "golden_metrics.json").read_text()),
    )


@pytest.fixture(params=["dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash_rank0"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """Every head of the reference in turn."""
    return read_recorded(request.param)


@pytest.fixture
def vanilla() -> Recorded:
    """The reference drafter with the default head."""
    return read_recorded("dspark_vanilla")


@pytest.fixture(scope="session")
def tiny_target() -> LoadedTarget:
    """The tiny Llama under the name that the tiny config gives it."""
    loaded = load_target(GOLDEN / "llama_tiny", jnp.float32)
    return dataclasses.replace(loaded, name="tests/golden/llama_tiny")


TEMPLATE = (
    "{% for message in messages %}{{ '<start> ' + message['role'] + ' ' + message['content'] "
    "+ ' <end> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)
STOP = 2


def words_text(template: str = TEMPLATE) -> Text:
    """A tokenizer of words, w0 to w154, with a chat template; ``<end>`` is ``STOP``."""
    words = ["<pad>", "<start>", "<end>", "user", "assistant", *(f"w{i}" for i in range(155))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<start>", "<end>"])
    return Text(tokenizer, ChatTemplate(template, {}, "test"))


@pytest.fixture(scope="session")
def chatty(tiny_target: LoadedTarget) -> LoadedTarget:
    """The tiny target with a vocabulary of words and a chat template."""
    return dataclasses.replace(tiny_target, text=words_text(), stop_token_ids=(STOP,))


@pytest.fixture
def forgetful_text() -> Text:
    """Its template keeps of a message only what follows the last ``w0``."""
    kept = "message['content'].split(' w0 ')[-1] + "
    return words_text(TEMPLATE.replace("message['content'] + ", kept))


def make_tiny_run(folder: Path) -> TrainConfig:
    """The shipped tiny config with data and output in ``folder``; one checkpoint, at the end."""
    generator = np.random.default_rng(0)
    documents = [
        supervised_answer(generator.integers(17, 150, 4), generator.integers(17, 150, size))
        for size in generator.integers(12, 30, 21)
    ]
    data = folder / "data"
    write_manifest(data, {"target": "tests/golden/llama_tiny", "template_sha256": ""})
    write_shard(data, 0, documents)
    config = read_config(ROOT / "configs" / "tiny.toml", TrainConfig)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, folders=(str(data),)),
        training=dataclasses.replace(config.training, output=str(folder / "run"), save_every=100),
    )


@pytest.fixture
def tiny_run(tmp_path: Path) -> TrainConfig:
    """The tiny run in a temporary folder."""
    return make_tiny_run(tmp_path)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and calibrations without diagrams, which take longer than all else in them."""
    monkeypatch.setattr("train.evaluate.draw_figures", lambda *_: None)
    monkeypatch.setattr("train.calibrate.draw_reliability", lambda *_, **__: None)


@pytest.fixture(scope="module")
def shared_tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The tiny run in a folder that lasts for a module."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))

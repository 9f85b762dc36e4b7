"""Loading and saving drafters in any dialect."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dspark_jax.checkpoints.drafter_config import (
    Dialect,
    dialect_of,
    drafter_config,
    is_deepseek,
    reserved_ids,
)
from dspark_jax.checkpoints.drafter_deepseek_v4 import (
    deepseek_v4_drafter_config,
    deepseek_v4_drafter_fields,
    deepseek_v4_drafter_tensors,
    deepseek_v4_drafter_weights,
)
from dspark_jax.checkpoints.drafter_deepspec import (
    deepspec_config,
    deepspec_tensors,
    read_deepspec,
)
from dspark_jax.checkpoints.drafter_speculators import (
    read_speculators,
    speculators_config,
    speculators_tensors,
)
from dspark_jax.checkpoints.drafter_tensors import DrafterTensors
from dspark_jax.checkpoints.hub import fetch
from dspark_jax.checkpoints.resolve import HUB_ID
from dspark_jax.checkpoints.tensors import READABLE_DTYPES, SafetensorsSource
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.deepseek_v4.config import DeepseekV4DrafterConfig, check_fits_v4
from dspark_jax.drafter.deepseek_v4.weights import DeepseekV4DrafterWeights
from dspark_jax.drafter.validate import check_fits
from dspark_jax.drafter.weights import DrafterWeights
from dspark_jax.json_file import read_object

# d2t and t2d of a pruned vocabulary are no floats.
_STORED_DTYPES = (*READABLE_DTYPES, "I64", "BOOL")


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that fits its target, and the name it was asked for by.

    ``config`` and ``weights`` are those of its family (``drafter.protocol``).
    """

    config: Any
    weights: Any
    name: str


def load_drafter(
    path_or_name: Path | str,
    target: tuple[Any, Any],
    dtype: Any | None = None,
    *,
    stop_token_ids: tuple[int, ...] = (),
) -> LoadedDrafter:
    """Load a drafter for a target.

    Args:
        path_or_name: a folder with ``config.json`` and safetensors, in DeepSpec's or
            speculators' layout or that of a DeepSeek-V4 target with its drafter, the name of a
            drafter shipped in the package, or a Hugging Face id (owner/name).
        target: config and weights of the target.
        dtype: of the loaded weights; None keeps the stored one (DeepSeek: takes the target's).
        stop_token_ids: ids that end the target's answers; the mask token must not be one.

    Returns:
        The drafter. Its embedding and head are None where the target's are used.

    Raises:
        FileNotFoundError: no such folder and no shipped drafter of that name.
        ConnectionError: a hub drafter that could not be fetched.
        ValueError: a checkpoint that is faulty, not supported, or of another target.
    """
    directory = find_drafter(path_or_name)
    raw = read_object(directory / "config.json")
    if is_deepseek(raw):
        return _load_deepseek(directory, raw, target, dtype, stop_token_ids, str(path_or_name))
    dialect = dialect_of(raw, directory)
    target_config = target[0]
    config = drafter_config(raw, directory, target_config)
    tensors = DrafterTensors(SafetensorsSource(directory, _STORED_DTYPES), directory)
    if dialect == "deepspec":
        weights = read_deepspec(config, tensors, dtype)
    else:
        weights = read_speculators(config, tensors, target_config, dtype)
    check_fits(config, target_config, {"stop": stop_token_ids, **reserved_ids(raw)})
    return LoadedDrafter(config, weights, Path(path_or_name).name)


def _load_deepseek(
    directory: Path,
    raw: dict[str, Any],
    target: tuple[Any, Any],
    dtype: Any | None,
    stop_token_ids: tuple[int, ...],
    name: str,
) -> LoadedDrafter:
    """The drafter of a DeepSeek-V4 checkpoint, by default in the dtype of its target."""
    config = deepseek_v4_drafter_config(raw, directory)
    check_fits_v4(config, target[0], stop_token_ids)
    embed = target[0].family.input_embedding(target[1])
    weights = deepseek_v4_drafter_weights(config, directory, dtype or embed.dtype)
    return LoadedDrafter(config, weights, Path(name).name)


def save_drafter(
    config: DrafterConfig | DeepseekV4DrafterConfig,
    weights: DrafterWeights | DeepseekV4DrafterWeights,
    directory: Path | str,
    target: tuple[Any, Any],
    *,
    dialect: Dialect | None = None,
    target_name: str = "",
) -> None:
    """Write ``config.json`` and ``model.safetensors`` into ``directory``, made if needed.

    DeepSpec's layout stores embedding and head in full; speculators', the default, leaves out
    what equals the target's. A DeepSeek-V4 drafter has one layout alone: DeepSeek's ``mtp.*``
    tensors, under a config that describes its target too.

    Args:
        config: of the drafter.
        weights: in the dtypes that are written.
        directory: of the checkpoint.
        target: config and weights of the target.
        dialect: of a DSpark drafter.
        target_name: the name or path a server loads the target by (speculators only).

    Raises:
        ValueError: a dialect that is not written or cannot express this drafter; weights that
            do not fit ``config``.
    """
    if isinstance(config, DeepseekV4DrafterConfig):
        if dialect is not None:
            raise ValueError(
                f"dialect {dialect!r} cannot express a DeepSeek-V4 drafter, whose tensors have "
                "DeepSeek's names: leave dialect out"
            )
        check_fits_v4(config, target[0])
        assert isinstance(weights, DeepseekV4DrafterWeights)
        raw = deepseek_v4_drafter_fields(config)
        tensors = deepseek_v4_drafter_tensors(config, weights)
    else:
        assert isinstance(weights, DrafterWeights)
        raw, tensors = _in_dialect(config, weights, target, dialect or "speculators", target_name)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _in_dialect(
    config: DrafterConfig,
    weights: DrafterWeights,
    target: tuple[Any, Any],
    dialect: Dialect,
    target_name: str,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of a DSpark drafter."""
    target_config, target_weights = target
    check_fits(config, target_config)
    embed = target_config.family.input_embedding(target_weights)
    lm_head = target_config.family.output_embedding(target_weights)
    dtype = weights.fc.dtype.name
    if dialect == "deepspec":
        tensors = deepspec_tensors(config, weights, embed, lm_head)
        return deepspec_config(config, dtype), tensors
    if dialect == "speculators":
        raw = speculators_config(config, dtype, target_config, target_name)
        return raw, speculators_tensors(config, weights, embed, lm_head)
    raise ValueError(f"dialect {dialect!r} is not written; written: deepspec, speculators")


def find_drafter(path_or_name: Path | str) -> Path:
    """The folder of a drafter: a path, a name shipped under ``dspark_jax/pretrained``, a hub id.

    Raises:
        FileNotFoundError: nothing of that name.
        ConnectionError: a hub drafter that could not be fetched.
    """
    name = str(path_or_name)
    shipped = Path(str(files("dspark_jax"))) / "pretrained"
    for directory in (Path(name).expanduser(), shipped / name):
        if (directory / "config.json").is_file():
            return directory
    if not Path(name).exists() and HUB_ID.fullmatch(name):
        return fetch(name)
    names = sorted(path.parent.name for path in shipped.glob("*/config.json"))
    raise FileNotFoundError(
        f"no drafter {name!r}: it is no folder with a config.json and no Hugging Face id "
        f"(owner/name), and the package ships {', '.join(names) or 'none'}"
    )

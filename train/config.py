"""Strict TOML: a file becomes a frozen dataclass, or an error that names the wrong key."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from train.losses import LossConfig
from train.mesh import MeshSection
from train.optimizer import Optimizer
from train.start import Trainable

Dtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class TargetSection:
    """The frozen target: a known name, a Hugging Face directory or a GGUF file."""

    name: str
    dtype: Dtype = "bfloat16"


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Documents, and the length in tokens that they are cut or padded to.

    They come from data ``folders``, or from a feature ``cache`` that holds the target's features
    beside them: exactly one of the two.
    """

    sequence_length: int
    folders: tuple[str, ...] = ()
    cache: str | None = None

    def __post_init__(self) -> None:
        """Refuse none or both sources."""
        if bool(self.folders) == (self.cache is not None):
            raise ValueError(
                f"data.folders is {list(self.folders)} and data.cache is {self.cache!r}; give one "
                "of the two"
            )


@dataclasses.dataclass(frozen=True)
class DrafterSection:
    """What of a dense drafter is chosen; widths and RoPE constants are the target's."""

    num_hidden_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True


@dataclasses.dataclass(frozen=True)
class DeepseekV4DrafterSection:
    """What of DeepSeek-V4's own drafter is chosen, one stage a tap; all else is the target's."""

    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int

    enable_confidence_head = True


@dataclasses.dataclass(frozen=True)
class TrainingSection:
    """The run. ``anchor_chunk`` anchors a sequence have logits at one time.

    ``start_from`` names a drafter (folder, shipped name or hub id) to begin with instead of new
    weights. ``trainable`` "confidence_head" leaves all else of it as it is; one that has no such
    head is given one.
    """

    output: str
    steps: int
    start_from: str | None = None
    trainable: Trainable = "drafter"
    seed: int = 42
    optimizer: Optimizer = "adamw"
    learning_rate: float = 6e-4
    batch_size: int = 32
    num_anchors: int = 256
    anchor_chunk: int = 16
    dtype: Dtype = "bfloat16"
    log_every: int = 10
    save_every: int = 500


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run, of a drafter of one of the two families."""

    target: TargetSection
    data: DataSection
    training: TrainingSection
    drafter: DrafterSection | None = None
    deepseek_v4_drafter: DeepseekV4DrafterSection | None = None
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)

    @property
    def described(self) -> DrafterSection | DeepseekV4DrafterSection:
        """The section that describes the drafter."""
        section = self.drafter or self.deepseek_v4_drafter
        assert section is not None
        return section

    def __post_init__(self) -> None:
        """Refuse none or both families, numbers out of range, a chunk that divides no anchors."""
        if (self.drafter is None) == (self.deepseek_v4_drafter is None):
            raise ValueError("give one of the sections drafter and deepseek_v4_drafter")
        counts = {
            "data.sequence_length": self.data.sequence_length,
            **{
                f"training.{field.name}": getattr(self.training, field.name)
                for field in dataclasses.fields(self.training)
                if field.type == "int" and field.name != "seed"
            },
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.training.seed < 0:
            raise ValueError(f"training.seed is {self.training.seed}; it must be at least 0")
        if self.training.trainable == "confidence_head":
            if self.training.start_from is None:
                raise ValueError(
                    'training.trainable is "confidence_head" and training.start_from is not set: '
                    "name the drafter whose head is trained"
                )
            if not self.described.enable_confidence_head:
                raise ValueError(
                    'training.trainable is "confidence_head" and drafter.enable_confidence_head '
                    "is false: there would be nothing to train"
                )
        rate = self.training.learning_rate
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"training.learning_rate is {rate}; it must be above 0")
        for name, value in dataclasses.asdict(self.loss).items():
            lowest = "above 0" if name == "decay" else "0 or more"
            if not math.isfinite(value) or value < 0 or (name == "decay" and value == 0):
                raise ValueError(f"loss.{name} is {value}; it must be {lowest}")
        if self.training.num_anchors % self.training.anchor_chunk:
            raise ValueError(
                f"training.anchor_chunk {self.training.anchor_chunk} does not divide "
                f"training.num_anchors {self.training.num_anchors}"
            )
        if self.training.num_anchors >= self.data.sequence_length:
            raise ValueError(
                f"training.num_anchors {self.training.num_anchors} must be below "
                f"data.sequence_length {self.data.sequence_length}"
            )


def read_config[T](path: Path, kind: type[T]) -> T:
    """A TOML file as an instance of the dataclass ``kind``.

    Raises:
        ValueError: invalid TOML, an unknown or missing key, a value of the wrong type.
        FileNotFoundError: no such file.
    """
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return from_table(table, kind, str(path))


def from_table[T](table: dict[str, Any], kind: type[T], where: str) -> T:
    """A parsed table as an instance of the dataclass ``kind``; ``where`` opens messages."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise ValueError(
            f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(hints))}"
        )
    missing = [
        field.name
        for field in fields
        if field.name not in table
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: missing key {missing[0]!r}")
    values = {name: _typed(value, hints[name], f"{where}: {name}") for name, value in table.items()}
    return kind(**values)


def _typed(value: Any, wanted: Any, where: str) -> Any:
    """``value`` as ``wanted``; whole numbers pass as floats, lists as tuples, nothing else."""
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {value!r}; wanted a table")
        return from_table(value, wanted, where)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(
                f"{where} is {value!r}; wanted one of {', '.join(map(str, arguments))}"
            )
        return value
    if origin in (types.UnionType, typing.Union):
        plain = next(argument for argument in arguments if argument is not type(None))
        return _typed(value, plain, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r}; wanted a list")
        return tuple(_typed(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        found, name = type(value).__name__, getattr(wanted, "__name__", wanted)
        raise ValueError(f"{where} is {value!r}, a {found}; wanted {name}")
    return value

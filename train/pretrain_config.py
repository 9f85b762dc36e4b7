"""What a pretraining run is asked for: the shape of a new target, text, and steps."""

from __future__ import annotations

import dataclasses
import math

from dspark_jax.models.deepseek_v4.config import DeepseekV4Config
from dspark_jax.models.deepseek_v32.config import DeepseekV32Config
from train.config import Dtype
from train.mesh import MeshSection
from train.optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class TeacherSection:
    """The model that wrote the data; the new target takes over its tokenizer and stop tokens."""

    name: str


@dataclasses.dataclass(frozen=True)
class TextSection:
    """Data ``folders``, and the length in tokens that documents are cut or padded to."""

    folders: tuple[str, ...]
    sequence_length: int


@dataclasses.dataclass(frozen=True)
class PretrainingSection:
    """The run."""

    output: str
    steps: int
    seed: int = 42
    optimizer: Optimizer = "adamw"
    learning_rate: float = 6e-4
    batch_size: int = 32
    dtype: Dtype = "bfloat16"
    log_every: int = 10
    save_every: int = 500


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """One pretraining run, of one of the two families."""

    teacher: TeacherSection
    data: TextSection
    training: PretrainingSection
    deepseek_v32: DeepseekV32Config | None = None
    deepseek_v4: DeepseekV4Config | None = None
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        """Refuse none or both families, no data, and numbers out of range."""
        if (self.deepseek_v32 is None) == (self.deepseek_v4 is None):
            raise ValueError("give one of the sections deepseek_v32 and deepseek_v4")
        if not self.data.folders:
            raise ValueError("data.folders is empty; wanted at least one folder")
        for section in (self.data, self.training):
            name = "data" if section is self.data else "training"
            for field in dataclasses.fields(section):
                value = getattr(section, field.name)
                if field.type == "int" and field.name != "seed" and value < 1:
                    raise ValueError(f"{name}.{field.name} is {value}; it must be at least 1")
        if self.training.seed < 0:
            raise ValueError(f"training.seed is {self.training.seed}; it must be at least 0")
        rate = self.training.learning_rate
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"training.learning_rate is {rate}; it must be above 0")
        limit = self.model.max_position_embeddings
        if self.data.sequence_length > limit:
            raise ValueError(
                f"data.sequence_length is {self.data.sequence_length}, but the target is made for "
                f"max_position_embeddings {limit}"
            )

    @property
    def model(self) -> DeepseekV32Config | DeepseekV4Config:
        """The target's shape."""
        model = self.deepseek_v32 or self.deepseek_v4
        assert model is not None
        return model

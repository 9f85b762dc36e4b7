"""What a data job is asked for: prompts, how answers are sampled, an optional feature cache."""

from __future__ import annotations

import dataclasses
import math

from train.config import TargetSection


@dataclasses.dataclass(frozen=True)
class PromptsSection:
    """Prompts to answer: JSON Lines files whose ``turns`` are the user's messages, in order."""

    files: tuple[str, ...]
    samples_per_prompt: int = 1


@dataclasses.dataclass(frozen=True)
class SelfPromptingSection:
    """Let the chat model write ``count`` user turns from its own template, at temperature 1."""

    count: int
    max_prompt_tokens: int = 256


@dataclasses.dataclass(frozen=True)
class AnswersSection:
    """How answers are sampled.

    ``max_context`` bounds a conversation in tokens, its answers included. ``thinking`` is the
    thinking mode of models that have one; left out, it is the template's own default.
    """

    output: str
    max_new_tokens: int
    max_context: int
    temperature: float = 1.0
    seed: int = 42
    batch: int = 1024
    shard_size: int = 16384
    thinking: bool | None = None


@dataclasses.dataclass(frozen=True)
class FeaturesSection:
    """A feature cache beside the tokens, for targets too large to run beside the drafter.

    ``target_layer_ids`` are the layers that drafters will tap; ``shard_bytes`` bounds a file.
    """

    output: str
    target_layer_ids: tuple[int, ...]
    batch: int = 16
    shard_bytes: int = 64 * 2**30


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """One data folder, from prompt files or by self-prompting: exactly one of the two."""

    target: TargetSection
    answers: AnswersSection
    prompts: PromptsSection | None = None
    self_prompting: SelfPromptingSection | None = None
    features: FeaturesSection | None = None

    def __post_init__(self) -> None:
        """Refuse none or both sources of prompts, and numbers out of range."""
        if (self.prompts is None) == (self.self_prompting is None):
            raise ValueError("give one of the sections prompts and self_prompting")
        for section in ("answers", "prompts", "self_prompting", "features"):
            values = getattr(self, section)
            for field in dataclasses.fields(values) if values is not None else ():
                value = getattr(values, field.name)
                if field.type == "int" and field.name != "seed" and value < 1:
                    raise ValueError(f"{section}.{field.name} is {value}; it must be at least 1")
        if self.answers.seed < 0:
            raise ValueError(f"answers.seed is {self.answers.seed}; it must be at least 0")
        temperature = self.answers.temperature
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"answers.temperature is {temperature}; it must be 0 (greedy) or more")
        if self.answers.max_new_tokens >= self.answers.max_context:
            raise ValueError(
                f"answers.max_new_tokens {self.answers.max_new_tokens} must be below "
                f"answers.max_context {self.answers.max_context}"
            )
        if self.features is not None:
            taps = self.features.target_layer_ids
            if not taps or list(taps) != sorted(set(taps)):
                raise ValueError(
                    f"features.target_layer_ids are {list(taps)}; wanted increasing layer numbers"
                )

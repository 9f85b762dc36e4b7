"""What an evaluation is asked for: a pair, prompt sets, sampling temperatures."""

from __future__ import annotations

import dataclasses
import math

from train.config import TargetSection


@dataclasses.dataclass(frozen=True)
class DrafterName:
    """The drafter to measure: a folder, the name of a shipped one, or a Hugging Face id."""

    name: str


@dataclasses.dataclass(frozen=True)
class SetSection:
    """One set: prompts to answer, or a data folder whose documents are measured as they are.

    Of a ``file`` of JSON lines with ``turns`` or ``prompt`` the first turns are answered: of the
    ``last`` lines if given, ``limit`` at most. A ``folder`` has teacher-forced figures only.
    ``language`` is noted, for drafters do better in the language they were trained in.
    """

    name: str
    file: str | None = None
    folder: str | None = None
    last: int | None = None
    limit: int | None = None
    language: str = "unstated"

    def __post_init__(self) -> None:
        """Refuse none or both sources, and counts that select nothing."""
        if (self.file is None) == (self.folder is None):
            raise ValueError(
                f"set {self.name!r} has file {self.file!r} and folder {self.folder!r}; "
                "give one of the two"
            )
        for name in ("last", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"set {self.name!r}: {name} is {value}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class EvaluationSection:
    """How it is measured.

    ``seed`` is the first prompt's at temperatures above 0, later ones count up. ``calibration``
    names a calibration file. ``thinking`` is the thinking mode of models that have one; left
    out, it is the template's own default. ``teacher_forced`` adds figures on the answers' own
    tokens, at ``num_anchors`` blocks a document.
    """

    output: str
    max_new_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 980406
    batch: int = 64
    calibration: str | None = None
    thinking: bool | None = None
    teacher_forced: bool = True
    num_anchors: int = 64


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """One evaluation of one drafter."""

    target: TargetSection
    drafter: DrafterName
    evaluation: EvaluationSection
    sets: tuple[SetSection, ...]

    def __post_init__(self) -> None:
        """Refuse no set, two of a name, and numbers out of range."""
        names = [one.name for one in self.sets]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"sets are named {names}; wanted one or more different names")
        settings = self.evaluation
        for name in ("max_new_tokens", "batch", "num_anchors"):
            if getattr(settings, name) < 1:
                raise ValueError(
                    f"evaluation.{name} is {getattr(settings, name)}; it must be at least 1"
                )
        if not 0 <= settings.seed < 2**32:
            raise ValueError(f"evaluation.seed is {settings.seed}; wanted 0..{2**32 - 1}")
        wrong = [t for t in settings.temperatures if not (math.isfinite(t) and t >= 0)]
        different = len(set(settings.temperatures)) == len(settings.temperatures) > 0
        if wrong or not different:
            raise ValueError(
                f"evaluation.temperatures are {list(settings.temperatures)}; wanted one or more "
                "different numbers of 0 (greedy) or more"
            )
        if not settings.teacher_forced:
            for one in self.sets:
                if one.folder is not None:
                    raise ValueError(
                        f"set {one.name!r} is a folder, whose only figures are teacher-forced, and "
                        "evaluation.teacher_forced is false"
                    )

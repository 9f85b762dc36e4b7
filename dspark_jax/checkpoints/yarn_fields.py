"""YaRN's numbers, as the configs of DeepSeek's families give them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.models.deepseek_rope import Yarn


def yarn_of(scaling: Mapping[str, Any], where: Path | str, also: Sequence[str] = ()) -> Yarn | None:
    """The rescaling that an object of a config asks for; None for rope type "default".

    Args:
        scaling: ``rope_scaling``, or what transformers puts in its place.
        where: names the file in errors.
        also: numbers that must stand there beside YaRN's own.

    Raises:
        ValueError: another rope type, numbers that are missing, or numbers that no frequency
            follows from.
    """
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{where}: rope_type {kind!r} is not supported; supported: default, yarn")
    names = [field.name for field in dataclasses.fields(Yarn)]
    missing = [name for name in (*names, *also) if scaling.get(name) is None]
    if missing:
        raise ValueError(f"{where}: yarn rope scaling lacks {', '.join(missing)}")
    for name in names:
        if not 0 < scaling[name] < math.inf:
            raise ValueError(
                f"{where}: {name} of yarn rope scaling is {scaling[name]}; wanted a finite number "
                "above 0"
            )
    return Yarn(**{name: scaling[name] for name in names})

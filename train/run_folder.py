"""The record of a run: resolved config, versions and data, checked again on resume."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax

RECORD = "run.json"
PACKAGES = ("dspark-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def open_run(folder: Path, config: Any, data: dict[str, Any], resume: bool) -> None:
    """Record a new run in ``folder``, or check that a resumed one is the same run.

    ``config`` is the run's dataclass, ``data`` what identifies the data it reads. A run may move
    to another mesh of devices.

    Raises:
        FileExistsError: a new run in a folder that holds one.
        FileNotFoundError: nothing to resume.
        ValueError: a resumed run whose config or data changed; the message names the key.
    """
    path = folder / RECORD
    record = {
        "config": dataclasses.asdict(config),
        "data": data,
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
    }
    if not resume:
        if path.exists():
            raise FileExistsError(
                f"{folder} holds a run already: continue it with --resume, or change its "
                "output folder in the config"
            )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        return
    if not path.exists():
        raise FileNotFoundError(f"nothing to resume: {path} does not exist")
    before = flat(json.loads(path.read_text()))
    now = flat(json.loads(json.dumps(record)))
    for key in sorted({*before, *now}):
        if not key.startswith(("config.", "data.")) or key.startswith("config.mesh."):
            continue
        if before.get(key) != now.get(key):
            raise ValueError(
                f"cannot resume {folder}: {key} was {before.get(key)!r} and is {now.get(key)!r}"
            )


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, keys joined by dots."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else key)
    return found

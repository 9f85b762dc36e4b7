"""The raw result of a bench: written after every arm, with the errors of arms that failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import dspark_jax
from dspark_jax.bench.summary import ANSWER_COLUMNS, add_ratios, mixed_traffic, verdicts


class Record:
    """What was run, on what, and what came out, in order of running."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path = path
        self.facts: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": jax.devices()[0].device_kind,
            "backend": jax.default_backend(),
            "cpus": os.cpu_count(),
            "xla_flags": os.environ.get("XLA_FLAGS"),
            "versions": {"dspark_jax": dspark_jax.__version__, "jax": jax.__version__},
            "answer_columns": ANSWER_COLUMNS,
            **facts,
        }
        self.arms: list[dict[str, Any]] = []

    @classmethod
    def of(cls, path: Path, facts: dict[str, Any], arms: list[dict[str, Any]]) -> Record:
        """What others have run, written to ``path``."""
        record = cls.__new__(cls)
        record._path, record.facts, record.arms = path, facts, arms
        record._write()
        return record

    def add(self, arm: dict[str, Any]) -> None:
        """Keep an arm, in place of what it had of the same load, and write everything so far."""
        self.arms = [one for one in self.arms if _load(one) != _load(arm)] + [arm]
        self._write()

    def _write(self) -> None:
        add_ratios(self.arms)
        content = {
            **self.facts,
            "arms": self.arms,
            "mixed_traffic": mixed_traffic(self.arms),
            "verdicts": verdicts(self.arms),
        }
        whole = self._path.with_name(self._path.name + ".part")
        whole.write_text(json.dumps(content) + "\n", encoding="utf-8")
        whole.replace(self._path)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Arms that have an error in place of figures."""
        return [arm for arm in self.arms if "error" in arm]


def _load(arm: dict[str, Any]) -> tuple[str, int | None]:
    return arm["arm"], arm.get("concurrency")


def merge(path: Path, parts: Sequence[Path]) -> Record:
    """One record of those that arms in processes of their own have written so far, by load.

    Raises:
        ValueError: nothing has been written.
    """
    found: list[dict[str, Any]] = [
        json.loads(part.read_text("utf-8")) for part in parts if part.exists()
    ]
    if not found:
        raise ValueError("no arm has written anything; wanted one load at least")
    entries = [entry for one in found for entry in one.pop("arms")]
    # an arm that chooses by costs knows their file, the others do not
    facts = max(found, key=lambda one: one["cost_table"] is not None)
    for derived in ("mixed_traffic", "verdicts"):
        del facts[derived]
    entries.sort(key=lambda one: one.get("concurrency", 0))
    return Record.of(path, facts | {"apart": True}, entries)

"""The raw result of a benchmark: written after every arm, and honest about arms that failed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dspark_jax.decode.request import Completion
from train.run_folder import versions


class Record:
    """What was run, on what, and what came out. ``arms`` is in order of running."""

    def __init__(self, path: Path | None, **facts: Any) -> None:
        self._path = path
        self.facts: dict[str, Any] = {
            "command": sys.argv,
            "commit": _commit(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": jax.devices()[0].device_kind,
            "backend": jax.default_backend(),
            "versions": versions(),
            **facts,
        }
        self.arms: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def arm(self, **names: Any) -> Iterator[dict[str, Any]]:
        """Collect one arm; an exception inside becomes its ``error`` and the others still run."""
        arm = dict(names)
        self.arms.append(arm)
        begin = time.perf_counter()
        try:
            yield arm
        except Exception as error:
            arm["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        arm["total_seconds"] = round(time.perf_counter() - begin, 3)
        self.write()
        label = " ".join(str(name) for name in names.values())
        print(f"[{arm['total_seconds']:.1f} s] {label}{' FAILED' if 'error' in arm else ''}")
        sys.stdout.flush()

    @property
    def failed(self) -> list[str]:
        """Errors of the arms that failed."""
        return [arm["error"] for arm in self.arms if "error" in arm]

    def write(self) -> None:
        """Write everything so far."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({**self.facts, "arms": self.arms}) + "\n")

    def finish(self) -> int:
        """Write, tell what failed, and give the exit code."""
        self.write()
        for error in self.failed:
            print(f"FAILED: {error}")
        if not self.arms:
            print("FAILED: nothing was measured")
        return 1 if self.failed or not self.arms else 0


def require_tokens(completions: list[Completion]) -> int:
    """Tokens of all answers.

    Raises:
        RuntimeError: an empty or aborted answer: nothing may be concluded from it.
    """
    for index, done in enumerate(completions):
        if not done.token_ids or done.finish_reason == "abort":
            raise RuntimeError(
                f"answer {index} has {len(done.token_ids)} tokens and ended by "
                f"{done.finish_reason!r}"
            )
    if not completions:
        raise RuntimeError("no answer was generated")
    return sum(len(done.token_ids) for done in completions)


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

"""Orbax checkpoints: training state and data position, saved and restored together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT = 2


class Checkpoints:
    """The checkpoints of one run; the newest ``KEPT`` stay on disk."""

    def __init__(self, folder: Path) -> None:
        """Open or create ``folder``."""
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Number of steps taken by the newest checkpoint, None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data_position: dict[str, Any]) -> None:
        """Save after ``step`` steps, once; returns when the state may be donated again."""
        if self._manager.latest_step() == step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_position)
            ),
        )

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The newest state, shaped and placed like ``like``, and its data position."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["data"]

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()

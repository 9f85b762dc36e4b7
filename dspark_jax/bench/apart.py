"""Arms in processes of their own: they compile side by side and then take turns at each load."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

MEMORY = 0.75
"""Share of a GPU's memory that the arms have between them, as JAX gives it to one process."""

Turn = Callable[[int], contextlib.AbstractContextManager[None]]
"""Waits until a load of so many users may be measured; another one's turn comes at its end."""

Work = Callable[[str, Turn], None]
"""What the process of an arm does: it asks for a turn at every load."""


@contextlib.contextmanager
def at_once(users: int) -> Iterator[None]:
    """The turn of an arm that has the machine to itself."""
    yield


def take_turns(
    arms: Sequence[str], loads: Sequence[int], work: Work, after: Callable[[], None]
) -> None:
    """Run ``work`` for all of ``arms`` at the same time, and one load of one arm at a time.

    Args:
        loads: that every arm asks a turn for, in this order.
        work: can be sent to another process.
        after: called when a load has been measured.

    Raises:
        RuntimeError: an arm ended before its first load; the others are ended, too.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = {arm: spawn.Pipe() for arm in arms}
    processes = {
        arm: spawn.Process(target=_arm, args=(arm, theirs, work, MEMORY / len(arms)), daemon=True)
        for arm, (_, theirs) in pipes.items()
    }
    try:
        for arm, process in processes.items():
            process.start()
            pipes[arm][1].close()  # so that its end is seen when the process ends
        ours = {arm: pipe for arm, (pipe, _) in pipes.items()}
        for arm, pipe in ours.items():
            if not _heard(pipe):
                raise RuntimeError(f"arm {arm} ended before its first load")
        waiting = set(arms)
        for _ in loads:
            for arm in [arm for arm in arms if arm in waiting]:
                ours[arm].send(None)
                _heard(ours[arm])
                after()
                # who has failed, and said why, asks for no further turn
                if not _heard(ours[arm]):
                    waiting.remove(arm)
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.terminate()
                process.join()


def _heard(pipe: Connection) -> bool:
    """Whether the next word came before the end."""
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def _arm(arm: str, pipe: Connection, work: Work, memory: float) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{memory:.3f}")

    @contextlib.contextmanager
    def turn(users: int) -> Iterator[None]:
        pipe.send(users)
        pipe.recv()
        try:
            yield
        finally:
            pipe.send(users)

    try:
        work(arm, turn)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"{arm}: {error}", file=sys.stderr)

"""Arms in processes of their own: they compile side by side and then take turns at each load."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

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
    arms: Sequence[str], loads: Sequence[int], work: Work, after: Callable[[], object]
) -> dict[str, str]:
    """Run ``work`` for all of ``arms`` at the same time, and one load of one arm at a time.

    Args:
        loads: that every arm asks a turn for, in this order.
        work: can be sent to another process.
        after: called when a load has been measured.

    Returns:
        How the processes ended that did not end well, by arm. The others go on without them.

    Raises:
        ValueError: an arm ended before its first load; the others are ended, too.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = {arm: spawn.Pipe() for arm in arms}
    ours = {arm: pipe for arm, (pipe, _) in pipes.items()}
    processes = {
        arm: spawn.Process(target=_arm, args=(arm, theirs, work, len(arms)), daemon=True)
        for arm, (_, theirs) in pipes.items()
    }
    try:
        for arm, process in processes.items():
            process.start()
            pipes[arm][1].close()  # so that its end is seen when the process ends
        waiting = {pipe: arm for arm, pipe in ours.items()}
        while waiting:
            for pipe in wait(list(waiting)):
                arm = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]
                if not _heard(ours[arm]):
                    raise ValueError(f"arm {arm} ended before its first load: nothing was measured")
        asking = set(arms)
        for _ in loads:
            for arm in [arm for arm in arms if arm in asking]:
                if _told(ours[arm]) and _heard(ours[arm]):
                    after()
                # who has failed asks for no further turn
                if not _heard(ours[arm]):
                    asking.remove(arm)
        for process in processes.values():
            process.join()
        return {
            arm: f"its process ended with exit code {process.exitcode}"
            for arm, process in processes.items()
            if process.exitcode
        }
    finally:
        for arm, process in processes.items():
            ours[arm].close()
            if process.pid is not None:
                process.terminate()
                process.join()


def _told(pipe: Connection) -> bool:
    """Whether the other side could be told that it is its turn."""
    try:
        pipe.send(None)
    except OSError:
        return False
    return True


def _heard(pipe: Connection) -> bool:
    """Whether the next word of the other side came before its end."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        return False
    return True


def _arm(arm: str, pipe: Connection, work: Work, arms: int) -> None:
    # the old name and the new one may not both be there
    given = os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    whole = float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or given or MEMORY)
    os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{whole / arms:.3f}"

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
    except (ValueError, OSError, NotImplementedError, ModuleNotFoundError) as error:
        print(f"{arm}: {error}", file=sys.stderr)
        sys.exit(1)

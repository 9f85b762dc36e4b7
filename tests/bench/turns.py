"""What the processes of arms do in a test: they note what happens when."""

from __future__ import annotations

from pathlib import Path


def note(log: Path, loads: tuple[int, ...], arm: str, turn) -> None:
    """Ask for a turn at each load; "short" gives up after its first, "late" before it."""

    def say(what: str) -> None:
        with log.open("a") as file:
            file.write(f"{what}\n")

    if arm == "late":
        raise ValueError("cannot run")
    say(f"{arm} ready")
    for users in loads:
        with turn(users):
            say(f"{arm} begins {users}")
            say(f"{arm} ends {users}")
        if arm == "short":
            raise ValueError("failed")

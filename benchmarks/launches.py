"""How many kernels one decode step launches, read off its compiled text.

The step is the body and the condition of the while loop in the compiled text. Every instruction
there that does work is one launch (a fusion, a product, a custom call, a copy, a sort, ...);
instructions that only name, shape or route values are none. Called computations are followed. Of
a conditional's branches the least and the most are kept. An inner loop counts as often as the text
says it runs, once where it does not say. Kernels that a GPU command buffer replays together are
counted one by one.
"""

from __future__ import annotations

import dataclasses
import re

NO_WORK = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "reshape",
        "opt-barrier",
        "optimization-barrier",
        "after-all",
        "partition-id",
        "replica-id",
        "add-dependency",
        "domain",
    }
)
"""Opcodes without a kernel; the ``-done`` half of a pair is another."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Launches:
    """Kernels of a step: on its shortest and its longest way through conditionals."""

    least: int
    most: int

    def __add__(self, other: Launches) -> Launches:
        return Launches(self.least + other.least, self.most + other.most)

    def times(self, count: int) -> Launches:
        """As often as ``count``."""
        return Launches(self.least * count, self.most * count)


def count_launches(compiled_text: str) -> Launches:
    """Launches of one turn of the largest while loop of a compiled program.

    Raises:
        ValueError: the text holds no while loop.
    """
    computations = _computations(compiled_text)
    turns = [
        _turn(computations, line)
        for lines in computations.values()
        for line in lines
        if _opcode(line) == "while"
    ]
    if not turns:
        raise ValueError("the compiled text holds no while loop")
    return max(turns, key=lambda turn: turn.most)


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = found.setdefault(header[1], [])
        elif _opcode(line):
            lines.append(line)
    return found


def _opcode(line: str) -> str | None:
    found = _INSTRUCTION.match(line)
    return found[1] if found else None


def _called(line: str, role: str) -> list[str]:
    """Computations that an instruction calls as ``role``: one, or a list in braces."""
    if one := re.search(rf"\b{role}=%?([\w.\-]+)", line):
        return [one[1]]
    if many := re.search(rf"\b{role}=\{{([^}}]*)\}}", line):
        return [name.strip().lstrip("%") for name in many[1].split(",")]
    return []


def _turn(computations: dict[str, list[str]], loop: str) -> Launches:
    """Launches of one turn of a loop."""
    body, condition = (_called(loop, role)[0] for role in ("body", "condition"))
    return _count(computations, body) + _count(computations, condition)


def _count(computations: dict[str, list[str]], name: str) -> Launches:
    total = Launches(0, 0)
    for line in computations[name]:
        opcode = _opcode(line)
        assert opcode is not None
        if opcode in NO_WORK or opcode.endswith("-done"):
            continue
        if opcode == "while":
            trips = _TRIPS.search(line)
            total += _turn(computations, line).times(int(trips[1]) if trips else 1)
        elif opcode == "conditional":
            names = _called(line, "branch_computations") or [
                *_called(line, "true_computation"),
                *_called(line, "false_computation"),
            ]
            branches = [_count(computations, branch) for branch in names]
            total += Launches(
                min(branch.least for branch in branches), max(branch.most for branch in branches)
            )
        elif opcode == "call" or (opcode == "async-start" and _called(line, "calls")):
            inner = _called(line, "to_apply") or _called(line, "calls")
            total += _count(computations, inner[0])
        else:
            total += Launches(1, 1)
    return total

"""Which part of a compiled step its kernels' time belongs to: a profile read by named scopes.

XLA keeps the scope in which an operation was traced (``jax.named_scope``) in the operation's name,
and a profile tells for every kernel which instruction launched it, unless a command buffer did: the
program has to be compiled without them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

REST = "rest"
"""The part of an instruction in no scope."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*\bop_name=\"([^\"]*)\"", re.MULTILINE)


class Span(NamedTuple):
    """One event of a line of a profile, in nanoseconds."""

    instruction: str
    start: float
    end: float


def parts_of(compiled_text: str, scopes: Sequence[str]) -> dict[str, str]:
    """Part of each instruction: the scopes that it was traced in, the outermost first, by ``/``."""
    return {
        name: "/".join(step for step in path.split("/") if step in scopes) or REST
        for name, path in _INSTRUCTION.findall(compiled_text)
    }


def own_times(spans: Iterable[Span]) -> list[tuple[str, float]]:
    """Nanoseconds of each span that no span within it has: a loop's body is not the loop."""
    found: list[tuple[str, float]] = []
    open_spans: list[list[Any]] = []

    def close(until: float) -> None:
        while open_spans and open_spans[-1][0].end <= until:
            span, inner = open_spans.pop()
            found.append((span.instruction, max(span.end - span.start - inner, 0.0)))

    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        close(span.start)
        if open_spans:
            open_spans[-1][1] += span.end - span.start
        open_spans.append([span, 0.0])
    close(float("inf"))
    return found


def part_seconds(
    run: Callable[[], Any], compiled_text: str, scopes: Sequence[str]
) -> dict[str, float]:
    """Seconds by part of one call of ``run``, a call of the program with this text.

    Raises:
        RuntimeError: the profile holds no kernel of the program.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        lines = list(_lines(ProfileData.from_file(str(file))))
    return add_up(lines, parts_of(compiled_text, scopes))


def add_up(lines: Iterable[Iterable[Span]], parts: Mapping[str, str]) -> dict[str, float]:
    """Seconds by part of the spans of all lines.

    Raises:
        RuntimeError: no span is of an instruction of the program.
    """
    seconds: dict[str, float] = {}
    known = False
    for line in lines:
        for instruction, nanoseconds in own_times(line):
            known |= instruction in parts
            part = parts.get(instruction, REST)
            seconds[part] = seconds.get(part, 0.0) + nanoseconds * 1e-9
    if not known:
        raise RuntimeError(
            "the profile holds no kernel of the program; wanted one recorded with CUPTI"
        )
    return seconds


def _lines(profile: Any) -> Iterable[list[Span]]:
    """Events of XLA's instructions, by stream of a GPU or by thread of the CPU client."""
    on_gpu = jax.default_backend() == "gpu"
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU" if on_gpu else "/host:CPU"):
            continue
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue
            spans = []
            for event in line.events:
                instruction = dict(event.stats).get("hlo_op")
                if instruction is not None:
                    end = event.start_ns + event.duration_ns
                    spans.append(Span(str(instruction), event.start_ns, end))
            if spans:
                yield spans

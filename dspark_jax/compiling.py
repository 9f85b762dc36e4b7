"""Ahead-of-time compilation of several programs beside each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
from rich.progress import track


def compile_together(programs: Iterable[jax.stages.Lowered], progress: bool = False) -> None:
    """Compile all of these; calls with arguments of the same shapes then find them compiled.

    Tracing holds the interpreter, compiling does not: while one program is traced, the ones
    before it compile, one a processor.

    Args:
        programs: lowered one by one, as they are asked for.
        progress: show a bar.
    """
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        compiling = [workers.submit(program.compile) for program in programs]
        for one in track(compiling, "compiling", disable=not progress):
            one.result()

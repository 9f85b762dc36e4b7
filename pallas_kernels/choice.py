"""Which implementation of an operation runs: the one asked for, or the one that can."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator

import jax

_log = logging.getLogger(__name__)

XLA = "xla"

# jit has a trace of its own for each value
_PREFERRED = jax.make_user_context(frozenset())


@contextlib.contextmanager
def preferring(**implementations: str) -> Iterator[None]:
    """Within, ``implementation=None`` takes these by operation where they can run.

    To compare whole programs. What was traced outside is traced anew within.
    """
    preferred = dict(_PREFERRED.value) | implementations
    with _PREFERRED(frozenset(preferred.items())):
        yield


def choose(
    operation: str,
    kernel: str,
    asked: str | None,
    automatic: str,
    obstacle: Callable[[], str | None],
) -> str:
    """``"xla"`` or ``kernel``; a choice made here is told once.

    Args:
        operation: its name, for messages.
        kernel: name of its other implementation.
        asked: what the caller wants; None leaves it open.
        automatic: what None takes where it can run, unless another is preferred.
        obstacle: why the kernel cannot run on these operands and this device; None if it can.

    Raises:
        ValueError: an unknown implementation.
        NotImplementedError: the kernel was asked for and cannot run.
    """
    if asked not in (None, XLA, kernel):
        raise ValueError(f'implementation is {asked!r}, wanted "{XLA}", "{kernel}" or None')
    wanted = dict(_PREFERRED.value).get(operation, automatic) if asked is None else asked
    reason = obstacle() if wanted == kernel else None
    if asked is None:
        wanted = wanted if reason is None else XLA
        _announce(operation, wanted, reason)
    elif reason is not None:
        raise NotImplementedError(f'{operation} cannot run as "{kernel}": {reason}')
    return wanted


def empty(**operands: jax.Array | jax.ShapeDtypeStruct | None) -> str | None:
    """Says which of the operands has no entry, or None: a launch of no programs is an error."""
    for name, operand in operands.items():
        if operand is not None and operand.size == 0:
            return f"{name} is empty, wanted at least one entry"
    return None


@functools.cache
def _announce(operation: str, implementation: str, obstacle: str | None) -> None:
    reason = "" if obstacle is None else f", because {obstacle}"
    _log.info("%s runs as %s%s", operation, implementation, reason)

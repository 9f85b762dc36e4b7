"""Entry point of `dspark`: finds the subcommand, parses its flags, reports errors in one line."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence

import tyro


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """Where a subcommand lives; its module is imported only when it runs."""

    module: str
    summary: str


SUBCOMMANDS = {
    "generate": Subcommand(
        "dspark_jax.cli.generate", "Decode prompts with a target and a drafter."
    ),
    "check": Subcommand("dspark_jax.cli.check", "Compare a model with recorded reference tensors."),
    "data": Subcommand("dspark_jax.cli.data", "Write training data with a target."),
    "pretrain": Subcommand("dspark_jax.cli.pretrain", "Train a small DeepSeek-shaped target."),
    "train": Subcommand("dspark_jax.cli.train", "Train a drafter from a TOML config."),
    "evaluate": Subcommand("dspark_jax.cli.evaluate", "Measure a drafter, or compare two runs."),
    "calibrate": Subcommand(
        "dspark_jax.cli.calibrate", "Fit the temperatures of a confidence head."
    ),
    "profile": Subcommand("dspark_jax.cli.profile", "Time the steps of serving: a cost table."),
    "bench": Subcommand("dspark_jax.cli.bench", "Measure an engine's settings under load."),
    "demo": Subcommand("dspark_jax.cli.demo", "Plain and DSpark decoding side by side."),
    "version": Subcommand("dspark_jax.cli.version", "Versions of the package and of JAX."),
}

EXTRA_OF_MODULE = {
    "array_record": "train",
    "grain": "train",
    "matplotlib": "train",
    "tensorboardX": "train",
    "huggingface_hub": "hub",
}

USAGE = "\n".join(
    [
        "usage: dspark SUBCOMMAND [FLAGS]    (dspark SUBCOMMAND --help lists its flags)",
        "",
        *(f"  {name:10s}{command.summary}" for name, command in SUBCOMMANDS.items()),
        "",
        "  --debug   show the traceback of an error",
    ]
)

FAILURE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `dspark` command line.

    Args:
        arguments: words after the program name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 2 for a wrong command line or an error, 130 when
        interrupted, or the number that the subcommand returned.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else FAILURE
    name, flags = words[0], words[1:]
    if name not in SUBCOMMANDS:
        return fail(f"unknown subcommand {name!r}, expected one of {', '.join(SUBCOMMANDS)}")
    try:
        result = tyro.cli(load(name), prog=f"dspark {name}", args=flags)
    except (ValueError, OSError, NotImplementedError, ModuleNotFoundError) as error:
        if debug:
            raise
        return fail(describe(error))
    except KeyboardInterrupt:
        if debug:
            raise
        return 130
    return result or 0


def load(name: str) -> Callable[..., int | None]:
    """The function behind a subcommand: the one named like it, in its module."""
    return getattr(importlib.import_module(SUBCOMMANDS[name].module), name)


def describe(error: Exception) -> str:
    """What went wrong, with the extra to install when an optional package is missing."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = EXTRA_OF_MODULE.get(error.name.partition(".")[0])
        if extra:
            return f"{error}; install it with: pip install 'dspark-jax[{extra}]'"
    return str(error) or type(error).__name__


def fail(message: str) -> int:
    """Print one error to the terminal and give the exit code of failure."""
    print(f"error: {message}", file=sys.stderr)
    return FAILURE


if __name__ == "__main__":
    sys.exit(main())

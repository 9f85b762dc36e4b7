"""What a reference folder recorded: tensors and numbers by name, none of them optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from dspark_jax.json_file import read_object


class Recorded(dict[str, Any]):
    """Recorded values by name; one that is missing is an error that names the file."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, name: str) -> Any:
        """Raise ValueError for a name that was not recorded."""
        raise ValueError(f"{self._path} lacks {name}, it holds {', '.join(sorted(self))}")


def recorded_tensors(path: Path) -> Recorded:
    """The tensors of a safetensors file.

    Raises:
        ValueError: a file that is not safetensors.
        FileNotFoundError: no such file.
    """
    try:
        return Recorded(load_file(path), path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def recorded_numbers(path: Path) -> Recorded:
    """The object of a JSON file.

    Raises:
        ValueError: a file that is no JSON object.
        FileNotFoundError: no such file.
    """
    return Recorded(read_object(path), path)

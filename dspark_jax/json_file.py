"""JSON files that hold one object, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: str | Path) -> dict[str, Any]:
    """The object in the JSON file ``path``.

    Raises:
        ValueError: no JSON in UTF-8, or JSON that is no object.
        FileNotFoundError: no such file.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__}; wanted an object")
    return data

"""Files of prompts: JSON Lines, a conversation or a raw prompt a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Lines of a prompt file, each with a list of strings ``turns`` or a string ``prompt``.

    Raises:
        ValueError: an empty file, a line that is no such object or holds an empty string;
            names the line.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from error
    lines = []
    # Not splitlines(): a JSON string may hold U+2028 and other line ends of Unicode.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        found = entry if isinstance(entry, dict) else {}
        turns, prompt = found.get("turns"), found.get("prompt")
        chat = isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
        if not chat and not isinstance(prompt, str):
            raise ValueError(
                f"{path}, line {number}: wanted turns (a list of strings) or prompt (a string), "
                f"found {line[:80]}"
            )
        if "" in (turns if isinstance(turns, list) else [prompt]):
            raise ValueError(f"{path}, line {number}: an empty prompt or turn in {line[:80]}")
        lines.append({"turns": turns} if chat else {"prompt": prompt})
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    return lines

"""The split of the prompt sets: what drafters may be trained on, and what they are measured on.

A prompt folder holds ``gsm8k.jsonl``, ``math500.jsonl``, ``mbpp.jsonl``, ``humaneval.jsonl`` and
``mt-bench.jsonl``; every line is an object with ``turns``, the user's messages.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dspark_jax.checkpoints.resolve import LoadedTarget

TRAINED_ON = ("gsm8k", "math500", "mbpp")
NEVER_TRAINED_ON = ("humaneval", "mt-bench")
HELD_OUT_LINES = 100
"""Last lines of each set in ``TRAINED_ON`` that are held out; the others are held out whole."""


def load(folder: Path, limit_per_set: int | None = None) -> dict[str, list[str]]:
    """First user messages of the held-out prompts, by set.

    Raises:
        FileNotFoundError: a set is missing.
        ValueError: a set too small to hold out from, or a line without ``turns``.
    """
    held_out = {name: _turns(folder, name)[-HELD_OUT_LINES:] for name in TRAINED_ON}
    held_out |= {name: _turns(folder, name) for name in NEVER_TRAINED_ON}
    return {name: turns[:limit_per_set] for name, turns in held_out.items()}


def training(folder: Path) -> dict[str, list[str]]:
    """First user messages of the prompts that may be trained on, by set; raises as ``load``."""
    return {name: _turns(folder, name)[:-HELD_OUT_LINES] for name in TRAINED_ON}


def interleave(sets: Mapping[str, Sequence[str]], count: int | None = None) -> list[str]:
    """Prompts one from each set in turn, ``count`` at most: balanced, and of mixed lengths.

    Raises:
        ValueError: fewer than ``count`` prompts.
    """
    rounds = itertools.zip_longest(*sets.values())
    mixed = [turn for turns in rounds for turn in turns if turn is not None]
    if count is not None and len(mixed) < count:
        raise ValueError(f"{len(mixed)} prompts were found, {count} were asked for")
    return mixed[:count]


def encode(target: LoadedTarget, turns: Sequence[str]) -> list[list[int]]:
    """Token ids of user messages in the target's chat template.

    Raises:
        ValueError: a target without tokenizer or template.
    """
    if target.text is None or not target.text.has_template:
        raise ValueError(f"target {target.name} has no chat template")
    return [target.text.chat_ids([{"role": "user", "content": turn}]) for turn in turns]


def context_for(prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Tokens that the longest prompt and its answer need, as a multiple of 64."""
    return -(-(max(map(len, prompts)) + new_tokens + 1) // 64) * 64


def _turns(folder: Path, name: str) -> list[str]:
    path = Path(folder) / f"{name}.jsonl"
    turns = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = json.loads(line).get("turns")
        if not (isinstance(found, list) and found and isinstance(found[0], str)):
            raise ValueError(f"{path}, line {number}: wanted turns, a list of strings")
        turns.append(found[0])
    if name in TRAINED_ON and len(turns) <= HELD_OUT_LINES:
        raise ValueError(f"{path} has {len(turns)} lines; {HELD_OUT_LINES} are held out")
    return turns


def main(prompts: Path, output: Annotated[Path, tyro.conf.arg(name="training")]) -> None:
    """Write the prompts that may be trained on, one JSON object a line.

    Args:
        prompts: the prompt folder.
        output: the file to write.
    """
    turns = [turn for turns in training(prompts).values() for turn in turns]
    output.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    print(f"{len(turns)} prompts written to {output}")


if __name__ == "__main__":
    tyro.cli(main)

"""Chat templates: Jinja in a sandbox, with the names that model templates rely on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A model's chat template. ``special`` holds ``bos_token`` and ``eos_token``.

    ``source`` is its text.
    """

    def __init__(self, source: str, special: Mapping[str, str], where: Path | str) -> None:
        """Compile ``source``.

        Raises:
            ValueError: the template does not compile; ``where`` says whose it is.
        """
        self.source, self.special = source, dict(special)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, **special}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template of {where} does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        thinking: bool | None = None,
    ) -> str:
        """The conversation as text.

        ``thinking`` reaches the template as ``enable_thinking`` (Qwen3 and others) and
        ``thinking`` (DeepSeek); None leaves both undefined, the template's own default.

        Raises:
            ValueError: a message without role or content, or a conversation that the template
                refuses.
        """
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise ValueError(
                        f"message {index} has {key} {message.get(key)!r}, wanted a string"
                    )
        modes = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **modes,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as templates expect it: Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent)

"""Text to token ids and back, chat included, for one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dspark_jax.json_file import read_object
from dspark_jax.text.chat_template import ChatTemplate
from dspark_jax.text.gguf_tokenizer import gguf_tokenizer
from dspark_jax.text.stream import TextStream

Message = Mapping[str, str]


class Text:
    """A tokenizer and, where the model has one, its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids: tuple[int, ...] = tuple(
            sorted(token_id for token_id, token in added.items() if token.special)
        )

    @classmethod
    def from_folder(cls, path: Path | str) -> Text:
        """Read ``tokenizer.json`` and the chat template beside it.

        Raises:
            FileNotFoundError: no ``tokenizer.json`` in ``path``.
            ValueError: a tokenizer, template or special token that cannot be parsed.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
        settings_file = folder / "tokenizer_config.json"
        settings = read_object(settings_file) if settings_file.is_file() else {}
        template_file = folder / "chat_template.jinja"
        source = (
            template_file.read_text()
            if template_file.is_file()
            else _default_template(settings.get("chat_template"), settings_file)
        )
        special = {
            key: _token_text(settings.get(key), key, settings_file)
            for key in ("bos_token", "eos_token")
        }
        return cls(tokenizer, None if source is None else ChatTemplate(source, special, folder))

    @classmethod
    def from_gguf(cls, metadata: Callable[[str], Any], where: Path | str) -> Text:
        """Build from GGUF metadata (``metadata(key)`` gives a value or None).

        Raises:
            ValueError: a vocabulary other than byte-level BPE, or a pre-tokenizer that is not
                known.
        """
        tokenizer = gguf_tokenizer(metadata, where)
        source = metadata("tokenizer.chat_template")
        if source is None:
            return cls(tokenizer, None)
        special = {}
        for key in ("bos_token", "eos_token"):
            token_id = metadata(f"tokenizer.ggml.{key}_id")
            special[key] = "" if token_id is None else tokenizer.id_to_token(token_id) or ""
        return cls(tokenizer, ChatTemplate(source, special, where))

    def save(self, path: Path | str) -> None:
        """Write what ``from_folder`` reads into a folder that exists."""
        folder = Path(path)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        if self._template is None:
            return
        settings = {**self._template.special, "chat_template": self._template.source}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    @property
    def has_template(self) -> bool:
        """Whether ``chat_ids`` works."""
        return self._template is not None

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``: no special token is added, but special strings in it are parsed.

        Raises:
            ValueError: a lone surrogate, which stands for bytes that were no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has {text[error.start]!r} at position {error.start}; "
                "wanted valid Unicode, without lone surrogates"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special tokens leave no trace, broken UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for ids that arrive a few at a time."""
        return TextStream(self.decode)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
    ) -> str:
        """The conversation as the chat template writes it.

        ``thinking`` switches the thinking mode of models that have one; None is the template's
        own default.

        Raises:
            ValueError: no template, a message without role or content, or a conversation that
                the template refuses.
        """
        if self._template is None:
            raise ValueError("this model has no chat template; give a raw prompt instead")
        return self._template.render(messages, add_generation_prompt, thinking)

    def chat_ids(self, messages: Sequence[Message], thinking: bool | None = None) -> list[int]:
        """Ids of the rendered conversation, ready for the model's answer."""
        return self.encode(self.render(messages, thinking=thinking))


def _default_template(stored: Any, where: Path) -> str | None:
    """A template stored as a string, or as a list of named ones (then the one named default)."""
    found = stored
    if isinstance(stored, list):
        named = (one for one in stored if isinstance(one, dict) and one.get("name") == "default")
        found = next(named, {}).get("template")
    if found is not None and not isinstance(found, str):
        raise ValueError(
            f"{where}: chat_template is {stored!r}; wanted a string, or a list of objects with "
            "name and template"
        )
    return found


def _token_text(stored: Any, key: str, where: Path) -> str:
    """A special token stored as a string, as a record, or not at all."""
    found = stored.get("content") if isinstance(stored, dict) else stored
    if found is not None and not isinstance(found, str):
        raise ValueError(
            f"{where}: {key} is {stored!r}; wanted a string, or an object whose content is one"
        )
    return found or ""

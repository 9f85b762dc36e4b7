"""A conversation as token ids: what serving would read before each answer, and what was answered.

The ids of a document are never made from text that was made from ids, with one exception: the
prompt of each turn, which is the chat template's, as in serving. Loss masks come from positions:
a token is supervised if the target generated it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_jax.decode.request import Completion
from dspark_jax.text.text import Message, Text
from train.data import TokenSequence


class Conversation:
    """One conversation as it grows: ``ask`` gives the ids to answer, ``hear`` adds the answer.

    Each turn's prompt is the template applied to all messages so far, exactly what a server
    sends to the model. When those ids begin with the document so far, the document goes on and
    its answers are all supervised. When they do not (the answer's text tokenises otherwise, or
    the template drops the thoughts of earlier turns), the document ends there, and another
    begins with the served ids, in which only the new answers are supervised. ``retemplated``
    counts how often.
    """

    def __init__(self, text: Text, turns: Sequence[str], thinking: bool | None) -> None:
        self.turns = tuple(turns)
        self.retemplated = 0
        self._text = text
        self._thinking = thinking
        self._messages: list[Message] = []
        self._closed: list[TokenSequence] = []
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._asked: tuple[list[Message], list[int]] | None = None

    def ask(self, turn: int) -> list[int]:
        """Ids before the answer to user turn ``turn``; the document grows only with the answer."""
        messages = [*self._messages, {"role": "user", "content": self.turns[turn]}]
        ids = self._text.chat_ids(messages, self._thinking)
        self._asked = messages, ids
        return ids

    def hear(self, done: Completion) -> None:
        """Add the answer to what was asked last."""
        assert self._asked is not None
        messages, ids = self._asked
        if ids[: len(self._tokens)] != self._tokens:
            self.retemplated += 1
            self._close()
        self._mask += [False] * (len(ids) - len(self._tokens)) + [True] * len(done.token_ids)
        self._tokens = [*ids, *done.token_ids]
        self._messages = [*messages, {"role": "assistant", "content": done.text or ""}]

    def documents(self) -> list[TokenSequence]:
        """Everything heard so far; empty if nothing was."""
        return [*self._closed, *([self._document()] if self._tokens else [])]

    def _close(self) -> None:
        self._closed.append(self._document())
        self._tokens, self._mask = [], []

    def _document(self) -> TokenSequence:
        return TokenSequence(np.array(self._tokens, np.int32), np.array(self._mask, bool))

"""A fingerprint of a chat template, by what it writes."""

from __future__ import annotations

import hashlib

from dspark_jax.text.text import Text

PROBE = "PROBE"


def template_digest(text: Text, thinking: bool | None = None) -> str:
    """SHA-256 of how the chat template writes one turn, and two with the answer between them.

    Raises:
        ValueError: a tokenizer without chat template.
    """
    messages = [
        {"role": "user", "content": PROBE},
        {"role": "assistant", "content": PROBE},
        {"role": "user", "content": PROBE},
    ]
    first = text.render(messages[:1], thinking=thinking)
    return hashlib.sha256((first + text.render(messages, thinking=thinking)).encode()).hexdigest()

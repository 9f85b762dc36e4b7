"""A byte-level BPE tokenizer from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

# GGUF token types.
CONTROL = 3
USER_DEFINED = 4

LETTERS_AND_SYMBOLS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(metadata: Callable[[str], Any], where: Path | str) -> Tokenizer:
    """Vocabulary, merges, pre-tokenizer and special tokens of a GGUF file.

    Raises:
        ValueError: a vocabulary other than byte-level BPE ("gpt2"), a pre-tokenizer that is not
            known, or a vocabulary without merges.
    """
    kind = metadata("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"{where}: tokenizer model {kind!r} is not supported; supported: gpt2")
    name = metadata("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{where}: pre-tokenizer {name!r} is not supported; supported: "
            + ", ".join(PRE_TOKENIZERS)
        )
    tokens = metadata("tokenizer.ggml.tokens")
    merges = metadata("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ValueError(f"{where}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            # Llama 3 keeps whole words of the vocabulary even where no merge leads to them.
            ignore_merges=name == "llama-bpe",
        )
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _smollm() -> PreTokenizer:
    """Every digit alone, then GPT-2's words."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_on(digits: str) -> PreTokenizer:
    pattern = LETTERS_AND_SYMBOLS.replace("DIGITS", digits)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "default": _gpt2,
    "llama-bpe": lambda: _split_on(r"\p{N}{1,3}"),
    "qwen2": lambda: _split_on(r"\p{N}"),
}

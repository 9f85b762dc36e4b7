"""Encoding, decoding and streaming with a small byte-level tokenizer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from dspark_jax.text.text import Text

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and two special ones behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<mask>", special=True)])
    return tokenizer


def write_folder(folder: Path, **settings: object) -> Path:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


TEXT = Text(byte_tokenizer(), None)


def test_special_strings_parse_to_their_ids_and_decode_to_nothing():
    ids = TEXT.encode("a<end>b")
    assert len(ids) == 3
    assert TEXT.special_ids == (256, 257)
    assert ids[1] == 256
    assert TEXT.decode(ids) == "ab"
    assert TEXT.vocab_size == 258


def test_an_unfinished_character_is_held_back_until_it_is_complete():
    stream = TEXT.stream()
    pieces = [stream.push([token]) for token in TEXT.encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert stream.flush() == ""


def test_text_before_an_unfinished_character_is_not_held_back():
    stream = TEXT.stream()
    ids = TEXT.encode("day é")
    assert stream.push(ids[:-1]) == "day "
    assert stream.push(ids[-1:]) == "é"


def test_flush_shows_what_never_became_a_character():
    stream = TEXT.stream()
    ids = TEXT.encode("é")[:1]
    assert stream.push(ids) == ""
    assert stream.flush() == TEXT.decode(ids) == "\ufffd"


@given(st.lists(st.lists(st.integers(0, 257), max_size=6), max_size=12))
def test_streamed_pieces_join_to_the_whole_text(pushes):
    """Any ids, valid UTF-8 or not, in any portions."""
    stream = TEXT.stream()
    pieces = [stream.push(ids) for ids in pushes]
    whole = TEXT.decode([token for ids in pushes for token in ids])
    assert "".join(pieces) + stream.flush() == whole


@given(st.text(max_size=20), st.integers(1, 4))
def test_no_piece_of_a_valid_text_holds_a_replacement_character(text, size):
    text = text.replace("\ufffd", "")
    ids = TEXT.encode(text)
    stream = TEXT.stream()
    pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.flush() == text


@pytest.mark.parametrize(
    "stored",
    [TEMPLATE, [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]],
    ids=["string", "named"],
)
@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>"}], ids=["string", "record"])
def test_a_folder_brings_its_chat_template(tmp_path, stored, eos):
    text = Text.from_folder(write_folder(tmp_path, chat_template=stored, eos_token=eos))
    messages = [{"role": "user", "content": "hi"}]
    assert text.has_template
    assert text.render(messages) == "<user>hi<end><assistant>"
    assert text.render(messages, add_generation_prompt=False) == "<user>hi<end>"
    assert text.chat_ids(messages) == text.encode("<user>hi<end><assistant>")


def test_a_template_file_wins_over_the_stored_one(tmp_path):
    write_folder(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Text.from_folder(tmp_path).render([{"role": "user", "content": "hi"}]) == "new"


def test_the_thinking_mode_reaches_the_template_and_is_its_own_default_otherwise(tmp_path):
    template = (
        "{% if enable_thinking is not defined %}default"
        "{% elif enable_thinking and thinking %}on{% else %}off{% endif %}"
    )
    text = Text.from_folder(write_folder(tmp_path, chat_template=template))
    messages = [{"role": "user", "content": "hi"}]
    rendered = [text.render(messages, thinking=mode) for mode in (None, True, False)]
    assert rendered == ["default", "on", "off"]
    assert text.chat_ids(messages, thinking=False) == text.encode("off")


def test_chat_without_a_template_is_refused():
    assert not TEXT.has_template
    with pytest.raises(ValueError, match="no chat template"):
        TEXT.chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "tool", "content": "x"}, "no tools"),
        ({"role": "user"}, "message 0 has content None"),
        ({"content": "x"}, "message 0 has role None"),
    ],
)
def test_a_conversation_the_template_cannot_hold_is_refused(tmp_path, message, fault):
    text = Text.from_folder(write_folder(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(ValueError, match=fault):
        text.render([message])


def test_a_template_cannot_reach_python(tmp_path):
    escape = "{{ messages.__class__.__mro__ }}"
    text = Text.from_folder(write_folder(tmp_path, chat_template=escape))
    with pytest.raises(ValueError, match="refuses"):
        text.render([{"role": "user", "content": "hi"}])


def test_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Text.from_folder(tmp_path)
    write_folder(tmp_path, chat_template="{% for %}")
    with pytest.raises(ValueError, match="does not compile"):
        Text.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Text.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chat_template": 5}, "chat_template is 5; wanted a string, or a list"),
        ({"chat_template": {"a": 1}}, "chat_template is {'a': 1}; wanted a string"),
        ({"chat_template": [{"name": "default", "template": 5}]}, "chat_template is .*; wanted"),
        ({"eos_token": 2}, "eos_token is 2; wanted a string, or an object"),
        ({"bos_token": {"content": [1]}}, r"bos_token is {'content': \[1\]}; wanted a string"),
    ],
)
def test_a_setting_of_a_tokenizer_that_is_no_text_is_named(tmp_path, settings, says):
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {says}"):
        Text.from_folder(write_folder(tmp_path, **settings))


def test_a_list_of_templates_without_a_default_is_no_template(tmp_path):
    stored = [{"name": "tools", "template": "x"}, {"name": [], "template": "y"}, "z"]
    assert not Text.from_folder(write_folder(tmp_path, chat_template=stored)).has_template


def test_bytes_that_were_no_utf8_are_refused():
    with pytest.raises(ValueError, match=r"has '.udcff' at position 2; wanted valid Unicode"):
        TEXT.encode("ab" + b"\xff".decode(errors="surrogateescape"))

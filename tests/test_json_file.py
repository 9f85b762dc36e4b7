"""JSON files that hold one object."""

import pytest

from dspark_jax.json_file import read_object


def test_an_object_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert read_object(path) == {"a": [1, "é"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.json is not readable JSON"),
        (b'{"a":', "a.json is not readable JSON"),
        (b"\xff\xfe{}", "a.json is not readable JSON"),
        (b"[1]", "a.json holds a JSON list; wanted an object"),
        (b"null", "a.json holds a JSON NoneType; wanted an object"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_file(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_object(path)

"""Files of one JSON object a line: whole lines are read, torn ones cut off, damaged ones named."""

import pytest

from elle.errors import InputError
from elle.files import append_line, read_lines


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", []),
        ('{"step": 1}\n', [{"step": 1}]),
        ('{"step": 1}\n{"step": 2, "wor', [{"step": 1}]),
        ('{"st', []),
    ],
)
def test_what_a_full_disk_has_left_of_a_line_does_not_spoil_the_next(tmp_path, before, after):
    path = tmp_path / "events.jsonl"
    path.write_text(before)
    append_line(path, {"step": 3, "word": "\u00e4"})
    assert read_lines(path) == [*after, {"step": 3, "word": "\u00e4"}]


@pytest.mark.parametrize("line", [b"\0\0\xff", b"3"])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "steps.jsonl").write_bytes(b'{"epoch": 1}\n' + line + b'\n{"epoch": 2}\n')
    with pytest.raises(InputError, match="steps.jsonl is damaged in line 2; take that line out"):
        read_lines(tmp_path / "steps.jsonl")

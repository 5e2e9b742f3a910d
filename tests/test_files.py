"""Files of one JSON object a line: whole lines are read, torn ones cut off, damaged ones named."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from elle.errors import InputError
from elle.files import FolderLock, append_line, is_held, read_lines, write_text


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


def refusing(number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_filesystem_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    with FolderLock(tmp_path, ".lock"):
        assert not is_held(tmp_path, ".lock")
    said = capsys.readouterr().err
    assert f"{tmp_path} cannot be locked ({os.strerror(number)})" in said
    assert said.count("\n") == 1


def test_a_folder_that_is_held_on_an_smb_share_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EACCES))
    with pytest.raises(InputError, match="is in use by another process"):
        FolderLock(tmp_path, ".lock")


def test_a_filesystem_that_flushes_no_folders_holds_files_all_the_same(tmp_path, monkeypatch):
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: (refusing(errno.EINVAL) if os.path.isdir(f"/dev/fd/{n}") else flush)(n))
    write_text(tmp_path / "result.json", "{}")
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


HOLDER = """
import os, sys, time
from pathlib import Path
from elle.files import FolderLock
with FolderLock(Path(sys.argv[1]), ".lock"):
    if not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_has_forked_does_not_hold_its_folder(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            assert is_held(tmp_path, ".lock")
            holder.kill()
            holder.wait()
            assert not is_held(tmp_path, ".lock")
        finally:
            os.kill(child, 9)

"""Disks that are full: one line, exit code 1, and nothing left behind."""

import os

import pytest

from elle.export.formats import FORMATS
from elle.files import FolderLock, is_held


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_ends_an_export_in_one_line(elle, finished_run, tmp_path, to):
    suffix = FORMATS[to].suffix
    half = tmp_path / f".net{'.torchscript' if to == 'torchscript' else ''}.{os.getpid()}.part{suffix}"
    half.symlink_to("/dev/full")  # where the file is written before it is put in place
    outcome = elle("export", finished_run, "--to", to, "--out", tmp_path / f"net{suffix}")
    assert outcome.code == 1
    assert outcome.err == (
        f"elle: could not write {tmp_path / f'net{suffix}'}: No space left on device; "
        f"what was there before is untouched\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_a_full_disk_is_held_all_the_same(tmp_path):
    (tmp_path / ".lock").symlink_to("/dev/full")
    with FolderLock(tmp_path, ".lock"):
        assert is_held(tmp_path, ".lock")
    assert not is_held(tmp_path, ".lock")

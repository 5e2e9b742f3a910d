"""Archives: nothing leaves the target folder, nothing but plain files is made, nothing is larger than allowed."""

import gzip
import io
import os
import tarfile

import pytest

from elle.data import files
from elle.data.files import open_archive, read_tar, unpack
from elle.errors import InputError, WorkError


def archive_of(path, *members, format=tarfile.USTAR_FORMAT):
    """A .tar.gz of (name, kind, contents or link target)."""
    with tarfile.open(path, "w:gz", format=format) as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                archive.addfile(info)
    return path


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_files_and_folders_are_unpacked(tmp_path, format):
    members = [("set", FOLDER, ""), ("set/a", FILE, b"one"), ("set/deep/b", FILE, bytes(70_000)), ("c", FILE, b"")]
    path = archive_of(tmp_path / "a.tar.gz", *members, format=format)
    written = unpack(path, tmp_path / "out")
    assert [file.relative_to(tmp_path / "out").as_posix() for file in written] == ["set/a", "set/deep/b", "c"]
    assert (tmp_path / "out/set/a").read_bytes() == b"one"
    assert (tmp_path / "out/set/deep/b").read_bytes() == bytes(70_000)
    assert unpack(path, tmp_path / "out") == written


@pytest.mark.parametrize(
    "member",
    [
        ("/absolute", FILE, b"x"),
        ("../above", FILE, b"x"),
        ("set/../../above", FILE, b"x"),
        ("..\\above", FILE, b"x"),
        ("C:/above", FILE, b"x"),
        ("link", LINK, "/etc"),
        ("set/link", LINK, "../../above"),
        ("hard", HARD, "/etc/passwd"),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("device", tarfile.CHRTYPE, ""),
        ("disk", tarfile.BLKTYPE, ""),
        ("../folder", FOLDER, ""),
    ],
)
def test_what_leaves_the_folder_or_is_no_file_is_refused_before_anything_is_written(tmp_path, member):
    path = archive_of(tmp_path / "a.tar.gz", ("good", FILE, b"x"), member)
    with pytest.raises(InputError, match="refused to unpack") as error:
        unpack(path, tmp_path / "out" / "deep")
    assert str(path) in str(error.value)
    assert [file.name for file in tmp_path.rglob("*")] == ["a.tar.gz"]


def test_a_link_that_is_already_there_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_text("keep")
    (tmp_path / "out" / "set").symlink_to(tmp_path / "outside")
    (tmp_path / "out" / "file").symlink_to(tmp_path / "secret")
    path = archive_of(tmp_path / "a.tar.gz", ("file", FILE, b"new"), ("set/a", FILE, b"new"))
    with pytest.raises(InputError, match="link out of"):
        unpack(path, tmp_path / "out")
    assert (tmp_path / "secret").read_text() == "keep"
    assert not any((tmp_path / "outside").iterdir())


def test_an_archive_that_unpacks_to_too_much_is_refused_by_its_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 100_000)
    many = archive_of(tmp_path / "many.tar.gz", *((f"{n}", FILE, bytes(30_000)) for n in range(4)))
    with pytest.raises(InputError, match="more than 100000 bytes"):
        unpack(many, tmp_path / "out")
    one = archive_of(tmp_path / "one.tar.gz", ("a", FILE, bytes(200_000)))
    with pytest.raises(InputError, match="more than 100000 bytes"):
        open_archive(one, ["a"])
    assert not (tmp_path / "out").exists()


def test_what_follows_the_last_file_of_an_archive_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 100_000)
    path = archive_of(tmp_path / "a.tar.gz", ("a", FILE, b"a"))
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content + bytes(50_000)))
    assert open_archive(path, ["a"]).read("a") == b"a"
    path.write_bytes(gzip.compress(content + bytes(3_000_000)))
    with pytest.raises(InputError, match="more than 100000 bytes"):
        open_archive(path, ["a"])


def test_an_archive_of_endless_empty_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_ENTRIES", 50)
    path = archive_of(tmp_path / "many.tar.gz", *((f"{n}", FILE, b"") for n in range(51)))
    with pytest.raises(InputError, match="or 50 files"):
        open_archive(path, ["a"])


def test_an_interrupt_while_unpacking_leaves_no_half_file_under_the_real_name(tmp_path, monkeypatch):
    path = archive_of(tmp_path / "a.tar.gz", ("a", FILE, bytes(3 * 2**20)))
    read = files.Member.read
    parts = []

    def interrupted(self, size=None):
        parts.append(self.name)
        if len(parts) == 5:  # the first three are of the look at all entries
            raise KeyboardInterrupt
        return read(self, size)

    monkeypatch.setattr(files.Member, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unpack(path, tmp_path / "out")
    assert files.Folder(tmp_path / "out").names() == []
    monkeypatch.setattr(files.Member, "read", read)
    assert unpack(path, tmp_path / "out") == [tmp_path / "out" / "a"]
    assert files.Folder(tmp_path / "out").names() == ["a"]
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_a_header_that_claims_more_than_there_is_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.size = 2**30 - 1
        archive.fileobj.write(info.tobuf(tarfile.USTAR_FORMAT))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(InputError, match="ends within 'a'"):
        open_archive(tmp_path / "a.tar.gz", ["a"])


@pytest.mark.parametrize(
    "content",
    [b"text", gzip.compress(b"text" * 200), gzip.compress(os.urandom(2000))[:-900]],
    ids=["text", "compressed text", "cut"],  # not the bytes: they hold the time, and two workers would collect others
)
def test_what_is_no_archive_is_named(tmp_path, content):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="get the file again") as error:
        list(read_tar(path))
    assert str(path) in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        list(read_tar(tmp_path / "absent"))


def test_a_cut_archive_is_refused_at_every_length(tmp_path):
    raw = archive_of(tmp_path / "a.tar.gz", ("a", FILE, os.urandom(3000)), ("b", FILE, b"b")).read_bytes()
    for length in [*range(20, len(raw), 97), len(raw) - 1]:
        (tmp_path / "a.tar.gz").write_bytes(raw[:length])
        with pytest.raises(InputError, match="damaged|ends within"):
            open_archive(tmp_path / "a.tar.gz", ["a", "b"])


def test_a_full_disk_is_no_fault_of_the_archive(tmp_path):
    path = archive_of(tmp_path / "a.tar.gz", ("set/a", FILE, b"x"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "set").write_text("in the way")
    with pytest.raises(WorkError, match="could not write"):
        unpack(path, tmp_path / "out")

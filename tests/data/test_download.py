"""Downloads against a local server that breaks off, lies, redirects, dawdles, or knows no ranges."""

import errno
import hashlib
import http.server
import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from elle.data import download as module
from elle.data.download import REMOTES, Remote, download, get
from elle.data.registry import DATASETS, load_dataset
from elle.errors import InputError, WorkError

from .layouts import write_archive, write_binary, write_idx

CONTENT = np.random.default_rng(0).bytes(3_000_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `behave(handler, path, content, start)` may answer in its own way and return True."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/file.bin": CONTENT}
        self.behave = lambda handler, content, start: False
        self.requests: list[tuple[str, str | None]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append((self.path, wanted))
        content = self.server.files.get(self.path)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if self.server.behave(self, content, start):
            return
        if content is None:
            self.send_error(404)
        elif start >= len(content):
            self.send_error(416)
        else:
            self.head(content, start)
            self.wfile.write(content[start:])

    def head(self, content: bytes, start: int) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    one = Server()
    yield one
    one.shutdown()
    one.server_close()


def remote(server: Server, content: bytes = CONTENT, path: str = "/file.bin") -> Remote:
    return Remote(server.address + path, hashlib.md5(content).hexdigest())


def silent(*_: object) -> None:
    pass


def test_a_download_is_whole_reported_and_not_repeated(server, tmp_path):
    seen: list[tuple[str, int, int | None]] = []
    path = download(remote(server), tmp_path / "new" / "folder", lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [have for _, have, _ in seen] == sorted(have for _, have, _ in seen)
    assert [file.name for file in path.parent.iterdir()] == ["file.bin"]
    assert download(remote(server), path.parent, silent) == path
    assert len(server.requests) == 1


def test_a_file_with_another_sum_is_replaced(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(b"old")
    assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT


def test_a_broken_connection_is_resumed_where_it_broke(server, tmp_path):
    def breaks(handler, content, start):
        if start > 2_000_000:
            return False
        handler.head(content, start)
        handler.wfile.write(content[start : start + 700_000])
        handler.connection.close()
        return True

    server.behave = breaks
    assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT
    ranges = [wanted for _, wanted in server.requests]
    assert ranges[0] is None
    assert len(ranges) > 2
    assert ranges[1:] == sorted(ranges[1:], key=lambda text: int(text.strip("bytes=-")))


def test_what_arrived_is_kept_when_the_server_stays_away_and_the_next_command_goes_on(server, tmp_path):
    def dies(handler, content, start):
        if start == 0:
            handler.head(content, 0)
            handler.wfile.write(content[:1_000_000])
        handler.connection.close()
        return True

    server.behave = dies
    with pytest.raises(WorkError, match="run it again") as error:
        download(remote(server), tmp_path, silent)
    part = tmp_path / "file.bin.part"
    assert str(part) in str(error.value)
    kept = part.stat().st_size
    assert 0 < kept <= 1_000_000
    assert len(server.requests) == 1 + module.ATTEMPTS
    server.behave = lambda *_: False
    server.requests.clear()
    assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT
    assert server.requests == [("/file.bin", f"bytes={kept}-")]
    assert not part.exists()


def test_a_wrong_sum_leaves_nothing_behind(server, tmp_path):
    server.files["/file.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(WorkError, match="MD5 sum") as error:
        download(remote(server), tmp_path, silent)
    assert hashlib.md5(CONTENT).hexdigest() in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [b"of another file", CONTENT, CONTENT + b"too long"])
def test_a_part_that_is_wrong_whole_or_too_long_is_found_out_by_the_sum(server, tmp_path, left):
    (tmp_path / "file.bin.part").write_bytes(left)
    if left == CONTENT:
        assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT
        return
    with pytest.raises(WorkError, match="MD5 sum"):
        download(remote(server), tmp_path, silent)
    assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_everything_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:12345])

    def ignores_ranges(handler, content, start):
        handler.head(content, 0)
        handler.wfile.write(content)
        return True

    server.behave = ignores_ranges
    assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT


def test_a_server_without_ranges_that_always_breaks_off_is_given_up(server, tmp_path):
    def breaks(handler, content, start):
        handler.head(content, 0)
        handler.wfile.write(content[: 400_000 + 300_000 * (len(server.requests) % 2)])
        handler.connection.close()
        return True

    server.behave = breaks
    with pytest.raises(WorkError, match="run it again"):
        download(remote(server), tmp_path, silent)
    assert len(server.requests) <= 2 + module.ATTEMPTS


def test_a_redirect_is_followed(server, tmp_path):
    def redirects(handler, content, start):
        if handler.path != "/old.bin":
            return False
        handler.send_response(302)
        handler.send_header("Location", "/file.bin")
        handler.end_headers()
        return True

    server.behave = redirects
    path = download(remote(server, path="/old.bin"), tmp_path, silent)
    assert (path.name, path.read_bytes()) == ("old.bin", CONTENT)
    assert [where for where, _ in server.requests] == ["/old.bin", "/file.bin"]


def test_a_redirect_to_a_local_file_or_in_a_circle_is_not(server, tmp_path):
    (tmp_path / "secret").write_bytes(CONTENT)
    for location in (f"file://{tmp_path}/secret", "/file.bin"):

        def redirects(handler, content, start, location=location):
            handler.send_response(302)
            handler.send_header("Location", location)
            handler.end_headers()
            return True

        server.behave = redirects
        with pytest.raises(WorkError):
            download(remote(server), tmp_path, silent)
        assert not (tmp_path / "file.bin").exists()


def test_a_slow_server_is_waited_for_and_a_silent_one_is_not(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 2)

    def dawdles(handler, content, start):
        handler.head(content, start)
        for place in range(start, len(content), 500_000):
            handler.wfile.write(content[place : place + 500_000])
            handler.wfile.flush()
            time.sleep(0.4)  # in all longer than the timeout
        return True

    server.behave = dawdles
    assert download(remote(server), tmp_path, silent).read_bytes() == CONTENT
    assert len(server.requests) == 1
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    server.behave = lambda *_: time.sleep(0.4) or True
    with pytest.raises(WorkError, match="timed out"):
        download(remote(server), tmp_path / "other", silent)


def test_a_missing_file_and_a_server_error_say_so(server, tmp_path):
    with pytest.raises(WorkError, match="404"):
        download(remote(server, path="/absent.bin"), tmp_path, silent)
    assert len(server.requests) == 1

    def fails(handler, content, start):
        handler.send_error(503)
        return True

    server.behave = fails
    with pytest.raises(WorkError, match="503"):
        download(remote(server), tmp_path, silent)
    assert len(server.requests) == 1 + module.ATTEMPTS


def test_no_connection_says_so(server, tmp_path):
    address = remote(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(WorkError, match="refused.*nothing has arrived; check the connection") as error:
        download(address, tmp_path, silent)
    assert "kept" not in str(error.value)  # there is no .part to go on with


def test_more_than_allowed_is_refused_announced_or_not(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100_000)
    with pytest.raises(WorkError, match="announces 3000000 bytes"):
        download(remote(server), tmp_path, silent)

    def does_not_announce(handler, content, start):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(content)
        return True

    server.behave = does_not_announce
    with pytest.raises(WorkError, match="sends more than"):
        download(remote(server), tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkError, match="could not write"):
        download(remote(server), tmp_path / "file", silent)


def test_a_full_disk_is_not_taken_for_a_broken_connection(server, tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elle.data.download.open", lambda *_: Full(), raising=False)
    with pytest.raises(WorkError, match=r"could not write .*\.part: No space left on device"):
        download(remote(server), tmp_path, silent)


def serve_set(server: Server, monkeypatch: pytest.MonkeyPatch, name: str, files: list[Path], folder: str) -> None:
    remotes = []
    for file in files:
        server.files[f"/{file.name}"] = file.read_bytes()
        remotes.append(Remote(f"{server.address}/{file.name}", hashlib.md5(file.read_bytes()).hexdigest(), folder))
    monkeypatch.setitem(REMOTES, name, tuple(remotes))


def test_what_get_fetches_is_what_training_reads(server, tmp_path, monkeypatch):
    archive = write_archive(tmp_path / "far" / "cifar-10-binary.tar.gz", write_binary(tmp_path / "far"))
    serve_set(server, monkeypatch, "cifar10", [archive], ".")
    files = get("cifar10", tmp_path / "root", silent)
    assert len(files) == 8
    archive_here = tmp_path / "root" / "cifar-10-binary.tar.gz"
    assert archive_here in files
    archive_here.unlink()  # the unpacked files do
    assert len(load_dataset("cifar10", tmp_path / "root").train) == 100
    serve_set(server, monkeypatch, "mnist", sorted(write_idx(tmp_path / "idx").iterdir()), "mnist")
    get("mnist", tmp_path / "root", silent)
    assert len(load_dataset("mnist", tmp_path / "root").test) == 10


def test_an_unknown_name_gets_the_nearest(tmp_path):
    with pytest.raises(InputError, match="did you mean 'cifar100'"):
        get("cifar-100", tmp_path, silent)


def test_every_address_is_of_a_row_and_every_sum_is_an_md5():
    assert REMOTES.keys() <= DATASETS.keys()
    for one in [one for remotes in REMOTES.values() for one in remotes]:
        assert one.url.startswith(("https://", "http://"))
        assert len(bytes.fromhex(one.md5)) == 16

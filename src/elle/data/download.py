"""Sets from their official addresses: resumed where a download broke off, checked, unpacked."""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elle.data.files import MAX_BYTES, unpack, writing
from elle.errors import InputError, WorkError, nearest
from elle.version import __version__

Report = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes there are, and the bytes there will be, where the server says so."""
ATTEMPTS = 5
"""In a row without a single new byte; then the download is left to be resumed by the next command."""
TIMEOUT = 30.0
"""Seconds without a byte from the server."""
PAUSE = 0.5
"""Seconds before the first new attempt; doubled with each."""
_PASSING = (408, 429)
"""Refusals that time heals: a timeout, too many requests."""
_CHUNK = 2**18


@dataclass(frozen=True)
class Remote:
    """One file: its address, the MD5 sum its publisher states, the folder it goes to."""

    url: str
    md5: str
    folder: str = "."

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def _remotes(address: str, folder: str, sums: dict[str, str]) -> tuple[Remote, ...]:
    return tuple(Remote(address + name, md5, folder) for name, md5 in sums.items())


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": _remotes(_TORONTO, ".", {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}),
    "cifar100": _remotes(_TORONTO, ".", {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}),
    "svhn": _remotes(
        "http://ufldl.stanford.edu/housenumbers/",
        "svhn",
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
    ),
    "mnist": _remotes(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": _remotes(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


def get(name: str, root: Path, report: Report) -> list[Path]:
    """Download what `name` consists of into `root`, and unpack archives there; the files that are there now."""
    if name not in REMOTES:
        raise InputError(f"no address for {name!r}{nearest(name, REMOTES)}; there are {', '.join(REMOTES)}")
    files = []
    for remote in REMOTES[name]:
        file = download(remote, root / remote.folder, report)
        files += [file, *(unpack(file, root) if remote.name.endswith(".tar.gz") else [])]
    return files


def download(remote: Remote, folder: Path, report: Report) -> Path:
    """The file in `folder`, downloaded unless it is there already with the right sum; NAME.part until it is whole."""
    target = folder / remote.name
    part = folder / f"{remote.name}.part"
    with writing(target):
        if target.exists() and _md5(target) == remote.md5:
            report(remote.name, target.stat().st_size, target.stat().st_size)
            return target
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(remote, part, report)
        found = _md5(part)
        if found != remote.md5:
            part.unlink()
            raise WorkError(
                f"{remote.url}: arrived with the MD5 sum {found}, not the published {remote.md5}; "
                f"nothing of it is kept; try again, and if it stays so the file was changed"
            )
        os.replace(part, target)
    return target


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        # The sums the publishers state; against accidents, not against an attacker.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(remote: Remote, part: Path, report: Report) -> None:
    """Fill `part`, going on where it ends, as long as each attempt or one of the next few brings something."""
    failures, most = 0, part.stat().st_size if part.exists() else 0
    while True:
        try:
            if _attempt(remote, part, report):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as problem:
            reason = f"the server says {problem.code} {problem.reason}"
            if problem.code == 416:  # nothing after what is there: whole, or too much; the sum will tell
                return
            if 400 <= problem.code < 500 and problem.code not in _PASSING:
                raise WorkError(f"{remote.url}: {reason}; the address may have changed") from None
        except (OSError, http.client.HTTPException) as problem:
            reason = str(getattr(problem, "reason", problem)) or type(problem).__name__
        size = part.stat().st_size if part.exists() else 0
        failures = 0 if size > most else failures + 1
        most = max(size, most)  # a server without ranges may start over and break off again and again
        if failures >= ATTEMPTS:
            kept = f"{size} bytes are kept in {part}; run it again to go on there"
            nothing = f"nothing has arrived; check the connection and run it again, or put the file in {part.parent}"
            raise WorkError(f"{remote.url}: {reason}; {kept if size else nothing}")
        time.sleep(min(2.0**failures, 10.0) * PAUSE)


def _attempt(remote: Remote, part: Path, report: Report) -> bool:
    """One request; whether everything the server announced has arrived."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": f"elle/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=TIMEOUT) as response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if goes_on else 0  # a server that knows no Range sends the whole file again
        announced = response.headers.get("Content-Length", "")
        total = have + int(announced) if announced.isdigit() else None
        if (total or 0) > MAX_BYTES:
            raise WorkError(f"{remote.url}: announces {total} bytes, more than {MAX_BYTES}: not the published file")
        have = _receive(response, part, have, lambda size: report(remote.name, size, total))
    if have > MAX_BYTES:
        part.unlink()
        raise WorkError(f"{remote.url}: sends more than {MAX_BYTES} bytes: not the published file")
    return total is None or have >= total


def _receive(response: http.client.HTTPResponse, part: Path, have: int, report: Callable[[int], None]) -> int:
    """Write what arrives after the first `have` bytes of `part`; how many bytes there are then."""
    with writing(part):  # here alone: any other OSError is a problem of the connection, not of the disk
        file = open(part, "ab" if have else "wb")  # noqa: SIM115 (closed below)
    with file:
        while have <= MAX_BYTES and (chunk := response.read1(_CHUNK)):
            with writing(part):
                file.write(chunk)
            have += len(chunk)
            report(have)
    return have

"""Small CIFAR-10 folders in each layout, written byte by byte as the official files are."""

import struct
from pathlib import Path

import numpy as np

from elle.data.cifar import CIFAR10

BATCH = 20  # images per file; the official ones hold 10,000


def fake_images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels uint8 [count, 3072] and labels uint8 [count], every class among them."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, (np.arange(count) % 10).astype(np.uint8)


def fake_batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {name: fake_images(BATCH, seed) for seed, name in enumerate(names)}


def write_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (x, y) in fake_batches().items():
        (folder / f"{name}.bin").write_bytes(np.column_stack([y, x]).tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10.classes) + "\n\n")
    return folder


def write_python(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (x, y) in fake_batches().items():
        (folder / name).write_bytes(batch_pickle(x, list(map(int, y))))
    names = py2_list([py2_string(name.encode()) for name in CIFAR10.classes])
    meta = {b"label_names": names, b"num_cases_per_batch": py2_int(10_000), b"num_vis": py2_int(3072)}
    (folder / "batches.meta").write_bytes(py2_pickle(py2_dict(meta)))
    return folder


def write_npz(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    batches = list(fake_batches().values())
    for name, parts in (("train", batches[:-1]), ("test", batches[-1:])):
        x = np.concatenate([x for x, _ in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        np.savez(root / f"{name}.npz", x=x, y=np.concatenate([y for _, y in parts]))
    return root


def batch_pickle(x: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 wrote it: protocol 2, str as BINSTRING, the array by _reconstruct and BUILD."""
    filenames = [py2_string(f"image_{number}.png".encode()) for number in range(len(labels))]
    fields = {
        b"batch_label": py2_string(b"training batch 1 of 5"),
        b"labels": py2_list([py2_int(label) for label in labels]),
        b"data": py2_array(x),
        b"filenames": py2_list(filenames),
    }
    return py2_pickle(py2_dict(fields))


def py2_pickle(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def py2_int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    return b"J" + struct.pack("<i", value)


def py2_string(value: bytes) -> bytes:
    head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
    return head + value


def py2_list(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def py2_dict(fields: dict[bytes, bytes]) -> bytes:
    return b"}q\x01(" + b"".join(py2_string(key) + value for key, value in fields.items()) + b"u"


def py2_array(x: np.ndarray) -> bytes:
    empty = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
    shape = b"(" + b"".join(py2_int(size) for size in x.shape) + b"t"
    kind = b"cnumpy\ndtype\nq\x0a" + py2_string(x.dtype.str[1:].encode()) + b"K\x00K\x01\x87Rq\x0b"
    order = py2_string(x.dtype.str[:1].encode())
    kind_state = b"(K\x03" + order + b"NNN" + py2_int(-1) + py2_int(-1) + b"K\x00tb"
    return empty + b"(K\x01" + shape + kind + kind_state + b"\x89" + py2_string(x.tobytes()) + b"tb"

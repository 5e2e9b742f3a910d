"""Small CIFAR-10 folders in each layout, written byte by byte as the official files are."""

import gzip
import io
import struct
import tarfile
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


def small_images(count: int, shape: tuple[int, ...], seed: int = 0, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels uint8 [count, *shape] and labels uint8 [count] of all classes, one after the other."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
    return pixels, (np.arange(count) % classes).astype(np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", size) for size in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, zipped: bool = True) -> Path:
    """MNIST's four files, 20 training and 10 test images."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 20), ("t10k", 10)):
        x, y = small_images(count, (28, 28), count)
        for name, array in ((f"{split}-images-idx3-ubyte", x), (f"{split}-labels-idx1-ubyte", y)):
            raw = idx_bytes(array)
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw, mtime=0) if zipped else raw)
    return folder


def write_mat(folder: Path, compressed: bool = True) -> Path:
    """SVHN's two files, 20 training and 10 test images; the digit 0 has the label 10."""
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 20), ("test", 10)):
        x, y = small_images(count, (32, 32, 3), count)
        labels = np.where(y == 0, 10, y)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": labels}, do_compression=compressed)
    return folder


def write_parquet(
    folder: Path, image: str = "img", label: str = "label", shape: tuple[int, ...] = (32, 32, 3), classes: int = 10
) -> Path:
    """Shards as Hugging Face writes them: two of training and one of test images, a PNG file of each class in each."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        x, y = small_images(classes, shape, seed, classes)
        images = [{"bytes": encoded(one, "PNG"), "path": f"{n}.png"} for n, one in enumerate(x)]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({image: pa.array(images, kind), label: pa.array(y.astype(np.int64))})
        parquet.write_table(table, folder / f"{name}.parquet")
    return folder


def encoded(image: np.ndarray, kind: str, **options: object) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


def write_archive(path: Path, folder: Path) -> Path:
    """A .tar.gz with `folder` in it, as the official ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path

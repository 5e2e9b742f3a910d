"""CIFAR-100, SVHN, MNIST, parquet, archives and a user's own arrays: read alike, and every wrong file named."""

import gzip
import io
import shutil
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from elle.data import files
from elle.data.arrays import own_arrays, read_npy, read_npz
from elle.data.check import check
from elle.data.cifar import CIFAR100, cifar10, cifar100
from elle.data.idx import fashion_mnist, mnist, read_idx
from elle.data.mat import read_mat, svhn
from elle.data.registry import DATASETS, load_dataset

from .layouts import (
    encoded,
    fake_batches,
    fake_images,
    idx_bytes,
    py2_array,
    py2_dict,
    py2_int,
    py2_list,
    py2_pickle,
    py2_string,
    small_images,
    write_archive,
    write_binary,
    write_idx,
    write_mat,
    write_npz,
    write_parquet,
    write_python,
)
from .refusing import assert_refused


def write_cifar100_binary(root):
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, seed in (("train", 1), ("test", 2)):
        x, _ = fake_images(20, seed)
        y = (np.arange(20) * 5).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(np.column_stack([y // 5, y, x]).tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(CIFAR100.classes) + "\n")
    return folder


def write_cifar100_python(root):
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, seed in (("train", 1), ("test", 2)):
        labels = {key: py2_list([py2_int(5 * n // by) for n in range(20)]) for key, by in FINE_AND_COARSE}
        (folder / name).write_bytes(py2_pickle(py2_dict({b"data": py2_array(fake_images(20, seed)[0]), **labels})))
    names = py2_list([py2_string(name.encode()) for name in CIFAR100.classes])
    (folder / "meta").write_bytes(py2_pickle(py2_dict({b"fine_label_names": names})))
    return folder


FINE_AND_COARSE = ((b"coarse_labels", 5), (b"fine_labels", 1))


@pytest.mark.parametrize("write", [write_cifar100_binary, write_cifar100_python])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar100_has_its_fine_labels_in_every_layout(tmp_path, write, packed):
    folder = write(tmp_path / "unpacked")
    root = folder.parent
    if packed:
        root = tmp_path / "archive"
        write_archive(root / f"{folder.name}.tar.gz", folder)
    images = cifar100(root)
    np.testing.assert_array_equal(images.train.x.reshape(20, -1), fake_images(20, 1)[0])
    np.testing.assert_array_equal(images.test.y, np.arange(20) * 5)
    assert images.classes == CIFAR100.classes
    assert (len(set(images.classes)), list(images.classes)) == (100, sorted(images.classes))


@pytest.mark.parametrize(("write", "name"), [(write_binary, "cifar-10-binary"), (write_python, "cifar-10-python")])
def test_cifar10_is_read_from_its_archives_or_from_one_given_as_the_root(tmp_path, write, name):
    folder = write(tmp_path / "unpacked")
    path = write_archive(tmp_path / f"{name}.tar.gz", folder)
    other = shutil.copy(path, tmp_path / "unpacked" / "other.tgz")
    for root in (tmp_path, path, Path(other)):
        images = cifar10(root)
        np.testing.assert_array_equal(images.test.x.reshape(20, -1), fake_batches()["test_batch"][0])
        assert len(images.train) == 100


def test_an_archive_that_lacks_a_file_is_named(tmp_path):
    folder = write_binary(tmp_path / "unpacked")
    (folder / "data_batch_4.bin").unlink()
    path = write_archive(tmp_path / "cifar-10-binary.tar.gz", folder)
    assert_refused(lambda: cifar10(tmp_path), path, "lacks data_batch_4.bin", "incomplete")


def test_an_archive_of_another_set_given_as_the_root_is_not_called_a_folder(tmp_path):
    path = write_archive(tmp_path / "cifar-10-binary.tar.gz", write_binary(tmp_path))
    for load, title in ((cifar100, "CIFAR-100"), (svhn, "SVHN")):
        assert_refused(lambda load=load: load(path), f"{path}: is no archive of {title}", "give a folder")


def write_cifar10_archive(root):
    return write_archive(root / "cifar-10-binary.tar.gz", write_binary(root / "unpacked"))


@pytest.mark.parametrize(
    ("load", "write", "name"),
    [
        (cifar10, write_cifar10_archive, "cifar-10-binary.tar.gz"),
        (cifar10, write_npz, "train.npz"),
        (svhn, write_mat, "train_32x32.mat"),
        (mnist, write_idx, "train-images-idx3-ubyte.gz"),
    ],
)
def test_damage_that_still_unpacks_is_found_by_the_checksum(tmp_path, load, write, name):
    write(tmp_path)
    load(tmp_path)
    raw = (tmp_path / name).read_bytes()
    # Behind the files' heads, of which not every bit says something.
    for place in np.linspace(300, len(raw) - 3000, 40).astype(int):
        (tmp_path / name).write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        assert_refused(lambda: load(tmp_path), name)


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_label_ten_is_the_digit_zero(tmp_path, compressed):
    write_mat(tmp_path / "svhn", compressed)
    images = svhn(tmp_path)
    x, y = small_images(20, (32, 32, 3), 20)
    np.testing.assert_array_equal(images.train.x, x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(images.train.y, y)
    assert (len(images.test), images.classes) == (10, tuple("0123456789"))


@pytest.mark.parametrize("compressed", [False, True])
def test_matrices_are_read_as_scipy_reads_them(tmp_path, compressed):
    from scipy.io import loadmat, savemat

    content = {"other": "text", "X": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.array([[1.5], [-2]])}
    savemat(tmp_path / "a.mat", content | {"cell": np.array([{}], dtype=object)}, do_compression=compressed)
    raw, theirs = (tmp_path / "a.mat").read_bytes(), loadmat(tmp_path / "a.mat")
    for key, ours in read_mat(raw, "a.mat", ("X", "y")).items():
        np.testing.assert_array_equal(ours, theirs[key])
    assert list(read_mat(raw, "a.mat", ("y",))) == ["y"]


def test_damage_that_unpacks_to_as_much_or_more_is_found_in_a_matrix(tmp_path):
    from scipy.io import savemat

    x = np.random.default_rng(0).integers(0, 16, (32, 32, 3, 4), dtype=np.uint8)  # few levels, so that it is compressed
    savemat(tmp_path / "a.mat", {"X": x}, do_compression=True)
    raw = (tmp_path / "a.mat").read_bytes()
    for place in range(300, len(raw) - 8, 41):
        damaged = raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]
        assert_refused(lambda damaged=damaged: read_mat(damaged, "a.mat", ("X",)), "a.mat", "damaged")


def test_wrong_matrices_are_named(tmp_path):
    from scipy.io import savemat

    path = write_mat(tmp_path) / "train_32x32.mat"
    x, y = small_images(4, (32, 32, 3))
    for content, words in (
        ({"X": x, "y": y}, ["uint8 [4, 32, 32, 3]", "[32, 32, 3, N]"]),
        ({"X": x.transpose(1, 2, 3, 0).astype(float), "y": y}, ["float64"]),
        ({"X": x.transpose(1, 2, 3, 0), "y": y + 1.5}, ["not 1 to 10"]),
        ({"X": x.transpose(1, 2, 3, 0), "y": y[1:] + 1}, ["4 images but 3 labels"]),
        ({"X": x.transpose(1, 2, 3, 0)}, ["no matrix `y`"]),
    ):
        savemat(path, content)
        assert_refused(lambda: svhn(tmp_path), path, *words)
    path.write_bytes(b"MATLAB 7.3 MAT-file" + bytes(200))
    assert_refused(lambda: svhn(tmp_path), path, "7.3", "-v7")
    path.write_bytes(b"hello")
    assert_refused(lambda: svhn(tmp_path), path, "no MATLAB 5 file")


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("load", "folder"), [(mnist, "MNIST/raw"), (fashion_mnist, "fashion-mnist"), (mnist, ".")])
def test_idx_files_plain_or_zipped_have_one_channel(tmp_path, zipped, load, folder):
    write_idx(tmp_path / folder, zipped)
    images = load(tmp_path)
    x, y = small_images(20, (28, 28), 20)
    np.testing.assert_array_equal(images.train.x, x[:, None])
    np.testing.assert_array_equal(images.train.y, y)
    assert images.test.x.shape == (10, 1, 28, 28)
    assert images.classes[9] == {"mnist": "9", "fashion_mnist": "Ankle boot"}[load.__name__]


def test_a_set_s_own_folder_is_read_before_files_of_the_same_names_in_the_root(tmp_path):
    own = write_idx(tmp_path / "fashion-mnist")
    write_idx(tmp_path)  # MNIST's files are called the same
    x = np.full((3, 28, 28), 7, np.uint8)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(x)))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(3, np.uint8))))
    np.testing.assert_array_equal(fashion_mnist(tmp_path).test.x, fashion_mnist(own).test.x)
    assert (mnist(tmp_path).test.x == 7).all()


def test_a_set_s_own_folder_is_read_in_any_layout_before_the_root_in_another(tmp_path):
    write_idx(tmp_path)  # MNIST's
    write_npz(tmp_path)  # CIFAR-10's
    x, y = np.full((10, 28, 28), 7, np.uint8), np.arange(10)
    (tmp_path / "fashion-mnist").mkdir()
    for split in ("train", "test"):
        np.savez(tmp_path / "fashion-mnist" / split, x=x, y=y)
    assert (fashion_mnist(tmp_path).train.x == 7).all()
    own = write_parquet(tmp_path / "svhn", "image")
    np.testing.assert_array_equal(svhn(tmp_path).train.x, svhn(own).train.x)


def test_what_a_set_s_own_folder_lacks_is_not_taken_from_the_root(tmp_path):
    write_npz(tmp_path)  # CIFAR-10's
    (write_mat(tmp_path / "svhn") / "test_32x32.mat").unlink()
    assert_refused(lambda: svhn(tmp_path), "incomplete", tmp_path / "svhn", "lacks test_32x32.mat")
    # An archive has the set's name.
    folder = write_binary(tmp_path / "elsewhere")
    write_archive(tmp_path / "cifar-10-binary.tar.gz", folder)
    (shutil.copytree(folder, tmp_path / folder.name) / "test_batch.bin").unlink()
    np.testing.assert_array_equal(cifar10(tmp_path).test.x, cifar10(folder).test.x)


def test_files_of_a_set_of_fewer_classes_are_not_taken_for_another(tmp_path):
    write_npz(tmp_path)
    assert_refused(lambda: cifar100(tmp_path), tmp_path, "90 classes", "'bowl'", "not CIFAR-100", "folder of its own")
    write_parquet(tmp_path / "cifar100")
    assert_refused(lambda: cifar100(tmp_path), tmp_path / "cifar100", "90 classes")


def test_wrong_idx_files_are_named(tmp_path):
    path = write_idx(tmp_path, zipped=False) / "train-images-idx3-ubyte"
    x, y = small_images(20, (28, 28))
    for raw, words in (
        (idx_bytes(x)[:-1], ["does not hold the"]),
        (idx_bytes(x) + b"1", ["does not hold the"]),
        (idx_bytes(y), ["3 dimensions"]),
        (idx_bytes(x[:, 1:]), ["27 x 28 pixels"]),
        (idx_bytes(x[1:]), ["19 images but 20 labels"]),
        (b"", ["no idx file"]),
        (gzip.compress(idx_bytes(x))[:-40], ["does not hold the"]),
        (b"\x1f\x8bwrong", ["damaged"]),
    ):
        path.write_bytes(raw)
        assert_refused(lambda: mnist(tmp_path), path, *words)


@pytest.mark.parametrize(
    ("load", "image", "label", "folder"),
    [
        (cifar10, "img", "label", "plain_text"),
        (cifar100, "img", "fine_label", "cifar100"),
        (svhn, "image", "label", "cropped_digits"),
    ],
)
def test_parquet_shards_are_joined_in_order(tmp_path, load, image, label, folder):
    classes = 100 if load is cifar100 else 10
    write_parquet(tmp_path / folder, image, label, classes=classes)
    images = load(tmp_path)
    parts = [small_images(classes, (32, 32, 3), seed, classes) for seed in range(3)]
    np.testing.assert_array_equal(images.train.x, np.concatenate([x for x, _ in parts[:2]]).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(images.test.y, parts[2][1])


def test_shards_of_several_row_groups_are_read(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    write_parquet(tmp_path)
    x, y = small_images(700, (32, 32, 3), 7)
    table = pa.table({"img": [{"bytes": encoded(one, "PNG")} for one in x], "label": y})
    parquet.write_table(table, tmp_path / "test-00000-of-00001.parquet", row_group_size=300)
    images = cifar10(tmp_path)
    np.testing.assert_array_equal(images.test.x, x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(images.test.y, y)


def test_grey_parquet_images_have_one_channel(tmp_path):
    write_parquet(tmp_path / "mnist", "image", shape=(28, 28))
    np.testing.assert_array_equal(mnist(tmp_path).test.x, small_images(10, (28, 28), 2)[0][:, None])
    write_parquet(tmp_path / "mnist", "image", shape=(28, 28, 3))
    assert_refused(lambda: mnist(tmp_path), "image 0", "not grey")


def test_a_shard_that_is_there_twice_or_missing_beside_a_copy_is_refused(tmp_path):
    write_parquet(tmp_path)
    first, second = (tmp_path / f"train-0000{number}-of-00002.parquet" for number in range(2))
    for copy in ("train-00000-of-00002 (1).parquet", "train.parquet", "train-00000-of-00002-0a1b2c3d.parquet"):
        shutil.copy(first, tmp_path / copy)
        assert_refused(lambda: cifar10(tmp_path), copy, "not the 2 shards of one set")
        (tmp_path / copy).unlink()
    other = first.rename(tmp_path / "train-00000-of-00001.parquet")
    assert_refused(lambda: cifar10(tmp_path), other.name, second.name, "not the 2 shards of one set")
    other.rename(first)
    shutil.copy(first, tmp_path / "train-00000-of-00002-0a1b2c3d.parquet")
    second.unlink()
    assert_refused(lambda: cifar10(tmp_path), "1 of the 2 shards", "get the others")
    first.unlink()
    assert_refused(lambda: cifar10(tmp_path), "1 of the 2 shards", "0a1b2c3d", "get the others")


def test_wrong_shards_are_named(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    path = write_parquet(tmp_path) / "train-00001-of-00002.parquet"
    good = encoded(small_images(1, (32, 32, 3))[0][0], "PNG")
    for table, words in (
        ({"img": [{"bytes": good[:200]}], "label": [1]}, ["image 0", "replace"]),
        ({"img": [{"bytes": encoded(np.zeros((8, 9, 3), np.uint8), "PNG")}], "label": [1]}, ["9 x 8 pixels"]),
        ({"img": [{"bytes": good}], "label": [10]}, ["label 10"]),
        ({"img": [{"bytes": good}, {"bytes": None}], "label": [1, 1]}, ["image 1", "no bytes"]),
        ({"img": [{"bytes": good + bytes(2**17)}] * 1000, "label": [1] * 1000}, ["image file of", "more than 65536"]),
        ({"img": [{"bytes": good}] * 2, "label": [1, None]}, ["image 1", "whole number"]),
        ({"img": [{"bytes": good}], "label": ["cat"]}, ["image 0", "whole number"]),
        ({"img": [1], "label": [1]}, ["no parquet file of images"]),
        ({"picture": [1], "label": [1]}, ["picture, label"]),
    ):
        parquet.write_table(pa.table(table), path)
        assert_refused(lambda: cifar10(tmp_path), path, *words)
    path.unlink()
    assert_refused(lambda: cifar10(tmp_path), "1 of the 2 shards")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train-00000-of-00002.parquet").rename(tmp_path / "train.parquet")
    assert_refused(lambda: cifar10(tmp_path), "elle-at[parquet]")


X, Y = small_images(12, (9, 7, 3))


def save_arrays(folder, kind, x=X, y=Y):
    folder.mkdir(exist_ok=True)
    pairs = {"train": (x, y), "test": (X[:5], Y[:5])}
    if kind == "pair":
        for split, (images, labels) in pairs.items():
            np.savez_compressed(folder / f"{split}.npz", x=images, y=labels)
    elif kind == "npy":
        for split, (images, labels) in pairs.items():
            np.save(folder / f"x_{split}.npy", images)
            np.save(folder / f"y_{split}.npy", labels)
    else:
        np.savez(folder / "all.npz", x_train=x, y_train=y, x_test=X[:5], y_test=Y[:5])
        return folder / "all.npz"
    return folder


@pytest.mark.parametrize("kind", ["pair", "npy", "one"])
@pytest.mark.parametrize("layout", ["last", "first", "fortran"])
def test_own_arrays_are_read_in_every_layout(tmp_path, kind, layout):
    x = {"last": X, "first": X.transpose(0, 3, 1, 2), "fortran": np.asfortranarray(X)}[layout]
    images = own_arrays(save_arrays(tmp_path / "a", kind, x))
    np.testing.assert_array_equal(images.train.x, X.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(images.test.y, Y[:5])
    assert images.classes == tuple("0123456789")
    assert images.train.x.flags.writeable


def test_own_arrays_may_be_grey_and_their_classes_named(tmp_path):
    root = save_arrays(tmp_path / "a", "pair")
    np.savez(root / "train.npz", x=X[..., 0], y=Y.astype(np.int32))
    np.savez(root / "test.npz", x=X[:5, ..., :1], y=Y[:5])
    (root / "classes.txt").write_text("".join(f"class {letter}\n" for letter in "abcdefghij"))
    images = load_dataset("arrays", root)
    assert images.train.x.shape == (12, 1, 9, 7)
    assert images.classes[3] == "class d"
    (root / "classes.txt").write_text("a\nb\n")
    assert_refused(lambda: own_arrays(root), root / "classes.txt", "names 2 classes", "up to 9")


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X / 255, Y, ["float64 [12, 9, 7, 3]", "values 0 to 255", "by 255"]),
        (X, Y[:, None], ["`y` is uint8 [12, 1]"]),
        (X, Y - 1.0, ["`y` is float64"]),
        (X[:-1], Y, ["11 images but 12 labels"]),
        (X, Y.astype(np.int64) * 10**17, ["label", "outside 0..11"]),
        (np.zeros((12, 3, 7, 3), np.uint8), Y, ["channels"]),
        (np.zeros((12, 9, 7, 5), np.uint8), Y, ["channels"]),
        (X[:0], Y[:0], ["no images"]),
        (X[:, 1:], Y, ["test images", "alike"]),
    ],
)
def test_wrong_own_arrays_are_named(tmp_path, x, y, words):
    root = save_arrays(tmp_path / "a", "pair", x, y)
    assert_refused(lambda: own_arrays(root), root, *words)


def test_own_arrays_of_one_class_are_refused_before_anything_is_trained(tmp_path):
    np.savez(tmp_path / "all.npz", x_train=X, y_train=0 * Y, x_test=X[:5], y_test=0 * Y[:5])
    assert_refused(lambda: own_arrays(tmp_path / "all.npz"), "all.npz", "only the class '0'", "two classes or more")
    np.savez(tmp_path / "all.npz", x_train=X, y_train=0 * Y + 2, x_test=X[:5], y_test=0 * Y[:5] + 2)
    assert_refused(lambda: own_arrays(tmp_path / "all.npz"), "all.npz", "only the class '2'", "two classes or more")


def test_own_labels_that_begin_at_1_are_refused_as_no_image_has_the_class_0(tmp_path):
    np.savez(tmp_path / "all.npz", x_train=X, y_train=Y + 1, x_test=X[:5], y_test=Y[:5] + 1)
    assert_refused(lambda: own_arrays(tmp_path / "all.npz"), "all.npz", "the labels begin at 1", "subtract 1")


def test_class_names_are_told_apart_and_a_mark_at_the_beginning_of_their_file_is_no_part_of_one(tmp_path):
    root = save_arrays(tmp_path / "a", "pair")
    (root / "classes.txt").write_text(
        "crane\n" + "".join(f"class {letter}\n" for letter in "bcdefghi") + "crane\n", "utf-8-sig"
    )
    images = own_arrays(root)
    assert (images.classes[0], images.classes[1], images.classes[9]) == ("crane (0)", "class b", "crane (9)")
    counts = check("arrays", root)["splits"]["train"]["per_class"]
    assert (len(counts), sum(counts.values())) == (10, 12)


def test_no_arrays_says_what_is_wanted(tmp_path):
    assert_refused(lambda: own_arrays(tmp_path), tmp_path, "train.npz", "x_train.npy", "root=FILE.npz")
    assert_refused(lambda: own_arrays(tmp_path / "absent"), "no such folder")


@pytest.mark.parametrize("kind", ["pair", "npy", "one"])
def test_an_array_that_is_too_large_is_not_called_damaged(tmp_path, monkeypatch, kind):
    root = save_arrays(tmp_path / "a", kind)
    monkeypatch.setattr("elle.data.arrays.MAX_ARRAY", X.nbytes - 1)
    assert_refused(lambda: own_arrays(root), root, f"of {X.nbytes} bytes; at most {X.nbytes - 1} are", "data=folder")


def test_object_arrays_are_never_made(tmp_path, monkeypatch):
    import pickle

    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("unpickled"))
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object))
    np.savez(tmp_path / "x.npz", x=np.array([{}], dtype=object))
    assert_refused(lambda: read_npy(tmp_path / "x.npy"), tmp_path / "x.npy", "plain numbers")
    assert_refused(lambda: read_npz(tmp_path / "x.npz", ("x",)), tmp_path / "x.npz", "plain numbers")


def bomb_npy(shape):
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


def test_claims_of_huge_sizes_are_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    """Each of these few bytes would otherwise become a terabyte, or more zeros than a machine has memory for."""
    monkeypatch.setattr(files, "MAX_BYTES", 2**20)
    monkeypatch.setattr("elle.data.idx.MAX_BYTES", 2**20)
    monkeypatch.setattr("elle.data.mat.MAX_BYTES", 2**20)
    (tmp_path / "x.npy").write_bytes(bomb_npy((2**20, 2**20)))
    assert_refused(lambda: read_npy(tmp_path / "x.npy"), "claims 1099511627776 bytes")
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bomb_npy((2**40,)) + bytes(2**20))
    assert_refused(lambda: read_npz(tmp_path / "x.npz", ("x",)), "claims")
    head = bytes([0, 0, 8, 3]) + struct.pack(">III", 2**20, 28, 28)
    assert_refused(lambda: read_idx(gzip.compress(head + bytes(1000)), "file", 3), "claims to hold")
    content = zlib.compress(struct.pack("<II", 14, 2**31) + bytes(2**22))
    raw = bytes(126) + b"IM" + struct.pack("<II", 15, len(content)) + content
    assert_refused(lambda: read_mat(raw, "file", ("X",)), "unpacks to more than")
    large = tmp_path / "cifar-10-batches-bin"
    write_binary(tmp_path)
    (large / "test_batch.bin").write_bytes(bytes(2**20 + 1))
    assert_refused(lambda: cifar10(tmp_path), "larger than")


def test_numpy_files_compressed_in_ways_numpy_does_not_are_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, X)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", buffer.getvalue())
    assert_refused(lambda: read_npz(tmp_path / "x.npz", ("x",)), "as NumPy does it")


def test_a_set_that_is_not_there_names_every_place_and_the_command(tmp_path):
    for name, row in DATASETS.items():
        if row.needs_root and name != "arrays" and not row.files:
            assert_refused(lambda row=row: row.load(tmp_path), tmp_path, f"elle data get {name}")

"""Every layout gives the same arrays; every kind of damage gives one line that names the file."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elle.data.bundled import digits
from elle.data.cifar import CIFAR10, cifar10
from elle.data.registry import DATASETS, find_dataset, load_dataset
from elle.data.sources import Split, some_images
from elle.errors import InputError

from .layouts import (
    BATCH,
    batch_pickle,
    fake_batches,
    fake_images,
    py2_array,
    py2_dict,
    py2_int,
    py2_list,
    py2_pickle,
    write_binary,
    write_npz,
    write_python,
)

WRITERS = {"bin": write_binary, "py": write_python, "npz": write_npz}


def assert_is_the_fake(data):
    batches = list(fake_batches().values())
    x = np.concatenate([x for x, _ in batches]).reshape(-1, 3, 32, 32)
    y = np.concatenate([y for _, y in batches])
    np.testing.assert_array_equal(np.concatenate([data.train.x, data.test.x]), x)
    np.testing.assert_array_equal(np.concatenate([data.train.y, data.test.y]), y)
    assert (len(data.train), len(data.test)) == (5 * BATCH, BATCH)
    assert data.classes == CIFAR10.classes
    for split in (data.train, data.test):
        assert (split.x.dtype, split.y.dtype) == (np.uint8, np.int64)
        assert split.x.flags.c_contiguous
        assert split.x.flags.writeable


def fails(root: Path, *words: object) -> None:
    with pytest.raises(InputError) as error:
        cifar10(root)
    for word in words:
        assert str(word) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", WRITERS)
def test_layouts_load_alike_from_the_parent_and_from_the_folder(tmp_path, layout):
    folder = WRITERS[layout](tmp_path)
    assert_is_the_fake(cifar10(tmp_path))
    assert_is_the_fake(cifar10(folder))


def test_npz_is_found_in_a_sub_folder(tmp_path):
    write_npz(tmp_path / "cifar10")
    assert_is_the_fake(cifar10(tmp_path))


def test_a_complete_layout_is_taken_before_an_incomplete_one(tmp_path):
    (write_binary(tmp_path) / "test_batch.bin").unlink()
    write_python(tmp_path)
    assert_is_the_fake(cifar10(tmp_path))


def test_batches_written_again_by_python_3_load(tmp_path):
    folder = write_python(tmp_path)
    for name, (x, y) in fake_batches().items():
        content = {"data": x, "labels": list(map(int, y))}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    assert_is_the_fake(cifar10(tmp_path))


@pytest.mark.parametrize("make", [True, False])
def test_nothing_there_names_every_place(tmp_path, make):
    root = tmp_path / "root"
    if make:
        root.mkdir()
    folders = [root / name for name in ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10")]
    fails(root, root, *folders, "no such folder", "elle data get cifar10")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("bin", "data_batch_3.bin"),
        ("bin", "test_batch.bin"),
        ("bin", "batches.meta.txt"),
        ("py", "data_batch_5"),
        ("py", "batches.meta"),
        ("npz", "test.npz"),
    ],
)
def test_a_missing_file_is_named(tmp_path, layout, name):
    folder = WRITERS[layout](tmp_path)
    (folder / name).unlink()
    fails(tmp_path, folder, name, "incomplete")


@pytest.mark.parametrize("cut", [1, 3072])
def test_a_truncated_binary_file_is_named(tmp_path, cut):
    path = write_binary(tmp_path) / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    fails(tmp_path, path, "3073")


def test_a_truncated_pickle_is_named(tmp_path):
    path = write_python(tmp_path) / "test_batch"
    path.write_bytes(path.read_bytes()[:1000])
    fails(tmp_path, path, "damaged")


def test_empty_files_are_named(tmp_path):
    path = write_binary(tmp_path) / "test_batch.bin"
    path.write_bytes(b"")
    fails(tmp_path, path, "no images")


def test_labels_out_of_range_are_named_in_every_layout(tmp_path):
    x, y = fake_images(BATCH)
    y[7] = 12
    binary = write_binary(tmp_path / "a") / "data_batch_4.bin"
    binary.write_bytes(np.column_stack([y, x]).tobytes())
    fails(tmp_path / "a", binary, "label 12", "0..9")
    python = write_python(tmp_path / "b") / "data_batch_4"
    python.write_bytes(batch_pickle(x, [-1, *range(1, BATCH)]))
    fails(tmp_path / "b", python, "label -1", "0..9")
    archive = write_npz(tmp_path / "c") / "test.npz"
    np.savez(archive, x=x.reshape(-1, 32, 32, 3), y=y)
    fails(tmp_path / "c", archive, "label 12", "0..9")


X, Y = fake_images(BATCH)
LABELS = list(map(int, Y))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (batch_pickle(X[:-1], LABELS), ["19 images but 20 labels"]),
        (batch_pickle(X[:, :-1], LABELS), ["uint8 [20, 3071]", "[N, 3072]"]),
        (batch_pickle(X.astype("<i4"), LABELS), ["int32 [20, 3072]"]),
        (batch_pickle(X.reshape(-1), LABELS), ["uint8 [61440]"]),
        (py2_pickle(py2_list([])), ["a list, not a dictionary"]),
        (py2_pickle(py2_dict({b"data": py2_array(X)})), ["no entry `labels`"]),
        (py2_pickle(py2_dict({b"labels": py2_int(1)})), ["no entry `data`"]),
        (py2_pickle(py2_dict({b"data": b"N", b"labels": b"]"})), ["`data` is a NoneType"]),
        (py2_pickle(py2_dict({b"data": py2_array(X), b"labels": b"](Ne"})), ["not a list of integers"]),
        (py2_pickle(py2_dict({b"data": py2_array(X), b"labels": py2_int(1)})), ["`labels` is a int"]),
        (py2_pickle(b"cos\nsystem\nU\x02ls\x85R"), ["refused", "os.system"]),
    ],
)
def test_wrong_contents_of_a_pickle_are_named(tmp_path, raw, words):
    path = write_python(tmp_path) / "data_batch_1"
    path.write_bytes(raw)
    fails(tmp_path, path, *words)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X.reshape(-1, 3, 32, 32), "y": Y}, ["uint8 [20, 3, 32, 32]", "[N, 32, 32, 3]"]),
        ({"x": X.reshape(-1, 32, 32, 3).astype(float), "y": Y}, ["float64"]),
        ({"x": X.reshape(-1, 32, 32, 3), "y": Y.astype(float)}, ["`y` is float64 [20]"]),
        ({"x": X.reshape(-1, 32, 32, 3), "y": Y[:, None]}, ["`y` is uint8 [20, 1]"]),
        ({"x": X.reshape(-1, 32, 32, 3), "y": Y[1:]}, ["20 images but 19 labels"]),
        ({"x": X.reshape(-1, 32, 32, 3)}, ["no arrays `x` and `y`"]),
        ({"x": np.array([{}], dtype=object), "y": Y}, ["no arrays `x` and `y`"]),
    ],
)
def test_wrong_arrays_in_an_archive_are_named(tmp_path, arrays, words):
    path = write_npz(tmp_path) / "train.npz"
    np.savez(path, **arrays)
    fails(tmp_path, path, *words)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_a_broken_archive_is_named(tmp_path, content):
    path = write_npz(tmp_path) / "test.npz"
    path.write_bytes(content)
    fails(tmp_path, path, "numpy.savez")


def test_wrong_class_names_are_named(tmp_path):
    text = write_binary(tmp_path / "a") / "batches.meta.txt"
    text.write_text("cat\ndog\n")
    fails(tmp_path / "a", text, "10 classes")
    meta = write_python(tmp_path / "b") / "batches.meta"
    meta.write_bytes(py2_pickle(py2_dict({b"label_names": py2_list([b"N"] * 10)})))
    fails(tmp_path / "b", meta, "10 classes")


@pytest.mark.parametrize(
    ("labels", "count", "numbers"),
    [
        ([0, 0, 0, 1, 1, 1, 2, 2], 4, [0, 2, 4, 6]),  # sorted: the first four would be of two classes
        ([2, 0, 1, 0, 1, 2, 0, 0], 4, [0, 1, 2, 3]),
        ([0, 0, 0, 1, 1, 1, 2, 2], 9, range(8)),
        ([0, 0, 0, 1, 1, 1, 2, 2], None, range(8)),
    ],
)
def test_some_images_are_of_every_class(labels, count, numbers):
    data = Split(np.arange(8, dtype=np.uint8).reshape(8, 1, 1, 1), np.array(labels))
    some, chosen = some_images(data, count)
    assert chosen.tolist() == some.x.ravel().tolist() == list(numbers)
    assert some.y.tolist() == [labels[k] for k in numbers]


def test_digits_have_the_promised_split():
    data, again = digits(), digits()
    assert (len(data.train), len(data.test)) == (1297, 500)
    assert data.train.x.shape[1:] == (1, 8, 8)
    assert (data.train.x.dtype, data.train.y.dtype) == (np.uint8, np.int64)
    assert (data.train.x.min(), data.train.x.max()) == (0, 255)
    assert len(np.unique(data.train.x)) == 17
    for split, least in ((data.train, 100), (data.test, 35)):
        assert np.bincount(split.y, minlength=10).min() >= least
    np.testing.assert_array_equal(data.test.x, again.test.x)
    assert data.test.y[:10].tolist() == again.test.y[:10].tolist() == [0, 9, 6, 9, 8, 4, 5, 8, 1, 6]
    assert data.classes == tuple("0123456789")


def test_mnist5k_comes_with_the_package_balanced_and_split_without_overlap():
    images = load_dataset("mnist5k")
    assert (images.train.x.shape, images.test.x.shape) == ((4000, 1, 28, 28), (1000, 1, 28, 28))
    assert (np.bincount(np.concatenate([images.train.y, images.test.y])) == 500).all()
    assert not {one.tobytes() for one in images.train.x} & {one.tobytes() for one in images.test.x}


def test_every_row_brings_the_same_settings():
    keys = {"model", "eps", "epochs", "batch", "lr", "schedule", "validation", "clip", "crop", "flip"}
    for name, row in DATASETS.items():
        assert row.name == name
        assert row.defaults.keys() == keys
        assert row.weights.keys() == {"elle", "elle-a"}


def test_an_unknown_name_gets_the_nearest_and_all():
    with pytest.raises(InputError, match=r"did you mean 'cifar10'.*digits, mnist5k, cifar10"):
        find_dataset("cifar-10")
    with pytest.raises(InputError, match="digits, mnist5k, cifar10"):
        find_dataset("")


def test_a_relative_root_that_is_not_there_is_told_with_the_folder_it_was_looked_for_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "arrays", "cifar10"):
        with pytest.raises(InputError, match=f"photos is looked for in {tmp_path}; .*--root FOLDER names another"):
            load_dataset(name, "photos")
        with pytest.raises(InputError) as told:
            load_dataset(name, tmp_path / "photos")
        assert "looked for in" not in str(told.value)


def test_root_is_the_argument_then_the_variable_then_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELLE_DATA", raising=False)
    with pytest.raises(InputError, match=r"data/cifar-10-batches-bin.*ELLE_DATA is not set"):
        load_dataset("cifar10", None)
    write_npz(tmp_path / "data")
    assert_is_the_fake(load_dataset("cifar10", None))
    monkeypatch.setenv("ELLE_DATA", str(tmp_path / "variable"))
    with pytest.raises(InputError, match=r"variable/cifar-10-batches-bin.*set by ELLE_DATA"):
        load_dataset("cifar10", None)
    write_binary(tmp_path / "variable")
    shutil.rmtree(tmp_path / "data")
    assert_is_the_fake(load_dataset("cifar10", None))
    with pytest.raises(InputError, match="argument"):
        load_dataset("cifar10", tmp_path / "argument")
    write_python(tmp_path / "argument")
    shutil.rmtree(tmp_path / "variable")
    assert_is_the_fake(load_dataset("cifar10", str(tmp_path / "argument")))


def test_digits_need_no_root(monkeypatch):
    monkeypatch.setenv("ELLE_DATA", "/nowhere")
    assert len(load_dataset("digits", None).test) == 500


def test_the_registry_starts_without_torch_and_scikit_learn():
    code = "import sys, elle.data.registry; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

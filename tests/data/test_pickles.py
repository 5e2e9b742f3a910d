"""Pickles give plain data and number arrays, or an InputError; they never run anything."""

import copyreg
import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elle.data.pickles import load_restricted
from elle.errors import InputError

from .layouts import batch_pickle, fake_images, py2_array, py2_dict, py2_int, py2_pickle, py2_string


def load(folder: Path, raw: bytes) -> object:
    return load_restricted(raw, str(folder / "batch"))


def reduce_to(function: str, argument: bytes) -> bytes:
    """A protocol-2 pickle that calls `module name` with one argument."""
    module, name = function.split()
    return py2_pickle(f"c{module}\n{name}\n".encode() + argument + b"\x85R")


class Call:
    """Pickles to a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_the_reference_pickles_are_what_pickle_itself_reads(tmp_path):
    x, y = fake_images(20)
    raw = batch_pickle(x, list(map(int, y)))
    ours, theirs = load(tmp_path, raw), pickle.loads(raw, encoding="bytes")
    assert ours.keys() == theirs.keys() == {b"batch_label", b"labels", b"data", b"filenames"}
    assert type(ours[b"data"]) is np.ndarray
    np.testing.assert_array_equal(ours.pop(b"data"), theirs.pop(b"data"))
    assert ours == theirs


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<f4", "b1"])
def test_reads_arrays_written_by_python_3(tmp_path, protocol, dtype):
    first = np.arange(12).reshape(3, 4).astype(dtype)
    content = {
        "a": first,
        "b": np.asfortranarray(first),
        "n": [1, -5, 2**40, None, True],
        "t": ("x", b"\xff"),
    }
    read = load(tmp_path, pickle.dumps(content, protocol=protocol))
    for key in "ab":
        assert read[key].dtype == first.dtype.newbyteorder("=")
        np.testing.assert_array_equal(read[key], first)
    assert read["n"] == content["n"]
    assert read["t"] == content["t"]


def test_reads_strings_longer_than_a_byte_can_say(tmp_path):
    assert load(tmp_path, py2_pickle(py2_string(b"a" * 70_000))) == b"a" * 70_000


MALICIOUS = {
    "os.system": reduce_to("os system", py2_string(b"touch ran")),
    "posix.system": reduce_to("posix system", py2_string(b"touch ran")),
    "builtins.eval": reduce_to("builtins eval", py2_string(b"open('ran', 'w')")),
    "__builtin__.eval": reduce_to("__builtin__ eval", py2_string(b"open('ran', 'w')")),
    "builtins.exec": pickle.dumps(Call(exec, "open('ran', 'w')")),
    "builtins.open": pickle.dumps(Call(open, "ran", "w"), protocol=2).replace(b"c_io\n", b"cio\n"),
    "builtins.getattr": pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
    "numpy.core.multiarray.scalar": reduce_to("numpy.core.multiarray scalar", py2_string(b"O")),
    "numpy.load": reduce_to("numpy load", py2_string(b"ran")),
    "_codecs.decode": reduce_to("_codecs decode", py2_string(b"x")),
    "numpy.ndarray.tofile": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "numpy.dtype.__class__": b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",
    "numpy.core.multiarray._reconstruct.__self__": (
        b"\x80\x04\x8c\x15numpy.core.multiarray\x8c\x15_reconstruct.__self__\x93."
    ),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_refuses_every_other_global_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="refused to load") as error:
        load(tmp_path, MALICIOUS[name])
    assert str(tmp_path / "batch") in str(error.value)
    refused = {"builtins.open": "io.open", "builtins.getattr": "builtins."}.get(name, name)
    assert refused in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "raw",
    {
        "instance, protocol 0": b"(S'touch ran'\nios\nsystem\n.",
        "object": b"(cos\nsystem\nS'touch ran'\no.",
        "new object": py2_pickle(b"cnumpy\ndtype\n" + py2_string(b"u1") + b"\x85\x81"),
        "persistent id, text": b"Pran\n.",
        "persistent id": py2_pickle(py2_string(b"ran") + b"Q"),
        "state of a list": py2_pickle(b"]}" + py2_string(b"a") + b"K\x01sb"),
        "state of a function": py2_pickle(b"c_codecs\nencode\nN}U\x0c__defaults__)s\x86b"),
        "state of a class": py2_pickle(b"cnumpy\ndtype\nN}U\x05orderU\x01<s\x86b"),
        "call of ndarray": py2_pickle(b"cnumpy\nndarray\n" + py2_int(10) + b"\x85R"),
        "codec that is not latin1": py2_pickle(b"c_codecs\nencode\nX\x01\x00\x00\x00aU\x05rot13\x86R"),
    }.items(),
    ids=lambda item: item[0],
)
def test_refuses_other_ways_to_make_or_change_objects(tmp_path, monkeypatch, raw):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        load(tmp_path, raw[1])
    assert not Path("ran").exists()


def test_refuses_extension_codes_even_when_registered_and_cached(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("os", "system", 240)
    try:
        call = py2_pickle(b"\x82\xf0")
        assert pickle.loads(call) is os.system  # and the code is cached from here on
        with pytest.raises(InputError):
            load(tmp_path, py2_pickle(b"\x82\xf0" + py2_string(b"touch ran") + b"\x85R"))
    finally:
        copyreg.remove_extension("os", "system", 240)
        copyreg.clear_extension_cache()
    assert not Path("ran").exists()


def test_refuses_arrays_of_anything_but_numbers(tmp_path):
    objects = np.array([{}, None], dtype=object)
    records = np.zeros(2, dtype=[("a", "O"), ("b", "i4")])
    for array in (objects, records, np.array(["text"]), np.array(["2020-01-01"], dtype="M8[D]")):
        for protocol in (2, 4):
            with pytest.raises(InputError, match="refused to load an array"):
                load(tmp_path, pickle.dumps(array, protocol=protocol))


def test_refuses_objects_smuggled_in_as_the_contents_of_a_number_array(tmp_path):
    good = py2_array(np.zeros(4, np.uint8))
    with pytest.raises(InputError, match="array of objects"):
        load(tmp_path, py2_pickle(good.replace(py2_string(bytes(4)), b"]")))


@pytest.mark.parametrize("sizes", [(5,), (-4,), (-2, -2), (2**31 - 1, 2**31 - 1), (3,)])
def test_refuses_shapes_that_do_not_fit_the_contents(tmp_path, sizes):
    good = py2_array(np.zeros(4, np.uint8))
    shape = b"(" + b"".join(py2_int(size) for size in sizes) + b"t"
    with pytest.raises(InputError):
        load(tmp_path, py2_pickle(good.replace(b"(K\x04t", shape)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not a pickle",
        b"\x80\x02}",
        b"\x80\xff.",
        py2_pickle(b"T" + struct.pack("<i", 2**31 - 1) + b"short"),
        py2_pickle(b"T" + struct.pack("<i", -1)),
        py2_pickle(b"B" + struct.pack("<I", 2**32 - 1) + b"short"),
        py2_pickle(b"\x8e" + struct.pack("<Q", 2**62)),
        py2_pickle(b"}]K\x01s"),  # a list as a key
    ],
)
def test_damaged_pickles_are_one_line_errors(tmp_path, raw):
    with pytest.raises(InputError) as error:
        load(tmp_path, raw)
    assert str(tmp_path / "batch") in str(error.value)
    assert "\n" not in str(error.value)


def test_huge_memo_indices_and_frames_take_no_memory(tmp_path):
    assert load(tmp_path, b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.") is None
    assert load(tmp_path, py2_pickle(b"K\x01r" + struct.pack("<I", 2**32 - 1))) == 1


def test_every_cut_of_a_valid_pickle_is_an_error(tmp_path):
    x, y = fake_images(1)
    raw = batch_pickle(x[:, :8], list(map(int, y)))
    for length in range(len(raw)):
        with pytest.raises(InputError):
            load(tmp_path, raw[:length])


def test_keys_whose_hash_never_ends_are_refused(tmp_path):
    doubled = b")q\x00" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    for store in (b"}" + doubled + b"K\x01s", b"}(" + doubled + b"K\x01u"):
        with pytest.raises(InputError, match="keys"):
            load(tmp_path, py2_pickle(store))


VALID = [
    batch_pickle(fake_images(2)[0][:, :6], [3, 7]),
    py2_pickle(py2_dict({b"x": py2_array(np.arange(3, dtype="<i8"))})),
    pickle.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2]}, protocol=2),
    pickle.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2]}, protocol=4),
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_damage_gives_a_value_or_an_input_error(tmp_path_factory, data):
    raw = bytearray(data.draw(st.sampled_from(VALID)))
    places = st.integers(0, len(raw) - 1)
    opcodes = st.sampled_from(list(b"()ct}]qrhjRbUTKMJNeus\x85\x86\x87\x93\x94\x95BCX.0\x81\x82"))
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        raw[place] = data.draw(st.integers(0, 255) | opcodes)
    with suppress(InputError):
        load(tmp_path_factory.getbasetemp(), bytes(raw))

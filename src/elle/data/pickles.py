"""Read the pickles CIFAR-10 and CIFAR-100 come in, without being able to run what is inside them."""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from elle.errors import InputError

# Numbers, strings, containers and the calls an array is made of. Left out on purpose: extension codes,
# persistent ids, class instances (INST, OBJ, NEWOBJ) and the text opcodes of protocol 0.
_OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
""".split()  # noqa: SIM905 - a list would take a line each


def load_restricted(raw: bytes, name: str) -> Any:
    """The plain data and number arrays in the pickle `raw`; strings of Python 2 arrive as bytes."""
    try:
        # From memory, so that a length beyond the end of the file finds nothing to allocate.
        return _Unpickler(io.BytesIO(raw)).load()
    except _Refused as refusal:
        reason = f"refused to load {refusal}, only arrays of plain numbers are read from a pickle"
    except Exception as error:  # a damaged pickle can fail in any way at all
        reason = f"is no pickle of plain data, or damaged ({type(error).__name__})"
    raise InputError(f"{name}: {reason}; get the file again from its official source")


class _Refused(Exception):
    """The pickle asks for something beyond plain data."""


@dataclass
class _NumberType:
    """Stands in for numpy.dtype, whose own __setstate__ believes any sizes, fields and flags it is told."""

    code: Any
    align: Any = False
    copy: Any = False
    order: str = "="

    def __post_init__(self) -> None:
        code = _text(self.code)
        if len(code) != 2 or code[0] not in "biuf" or code[1] not in "1248":
            raise _Refused(f"an array of type {code[:20]!r}")

    def plain(self) -> np.dtype[Any]:
        return np.dtype(_text(self.code)).newbyteorder(self.order)  # type: ignore[arg-type]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return bytes.decode(value, "ascii")


def _empty_array(*_: Any) -> npt.NDArray[np.uint8]:
    """Stands in for _reconstruct: the array starts empty, and BUILD fills it."""
    return np.empty(0, np.uint8)


def _latin1(text: str, codec: Any) -> bytes:
    """Stands in for _codecs.encode, by which Python 3 writes bytes, array contents too, in protocol 2."""
    if _text(codec) != "latin1":
        raise _Refused(f"the codec {_text(codec)[:20]!r}")
    return text.encode("latin1")


def _fill(array: npt.NDArray[Any], state: Any) -> None:
    """What ndarray.__setstate__ does, for plain numbers of a checked type, shape and length only."""
    _version, shape, kind, fortran, raw = state
    if not isinstance(kind, _NumberType) or not isinstance(raw, bytes):
        raise _Refused("an array of objects")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("not a shape")
    is_fortran: Any = bool(fortran)
    array.__setstate__((1, shape, kind.plain(), is_fortran, raw))  # checks the length of raw


# Nothing of NumPy is handed out: the class is only ever an argument of _reconstruct, so its name will do.
_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): "numpy.ndarray",
    ("numpy", "dtype"): _NumberType,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python, not C: its opcodes can be restricted, and huge memo indices cost nothing."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise _Refused(repr(f"{module}.{name}"[:80]))
        return _GLOBALS[module, name]

    def load_build(self) -> None:
        """BUILD sets attributes at will; here it fills an array or gives a number type its byte order."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        target = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(target, np.ndarray):
            _fill(target, state)
        elif isinstance(target, _NumberType):
            target.order = _text(state[1])
        else:
            raise _Refused(f"a state for {type(target).__name__}")

    def load_setitem(self) -> None:
        """Only plain keys: the hash of a tuple of tuples, each twice in the next, would never end."""
        self._refuse_keys(self.stack[-2:-1])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        self._refuse_keys(self.stack[::2])  # type: ignore[attr-defined]
        super().load_setitems()  # type: ignore[misc]

    @staticmethod
    def _refuse_keys(keys: list[Any]) -> None:
        if not all(isinstance(key, bytes | str) for key in keys):
            raise _Refused("a dictionary whose keys are not strings")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems

"""FORMATS: how a network is written to a file and read back, one row each; images in [0, 1] in, logits out."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elle.engine.checkpoint import packed
from elle.engine.trained import load_network
from elle.errors import InputError

Header = Mapping[str, Any]
"""What the file says of itself: network, shape of an image, classes."""
KEY = "elle"
"""Under which a file keeps its header, as JSON."""


@dataclass(frozen=True)
class Format:
    name: str
    description: str
    suffix: str
    write: Callable[[nn.Module, Tensor, Header, Path], None]
    """(network in eval mode, some images, header, file)"""
    read: Callable[[Path], Callable[[Tensor], Tensor]]
    loader: str
    """Python that defines load_model(path), as a user's program would."""


def _write_safetensors(model: nn.Module, x: Tensor, header: Header, path: Path) -> None:
    path.write_bytes(packed(model.state_dict(), header))


def _read_safetensors(path: Path) -> Callable[[Tensor], Tensor]:
    return load_network(path)[0]


def _write_torchscript(model: nn.Module, x: Tensor, header: Header, path: Path) -> None:
    traced = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    content = io.BytesIO()  # torch itself ends the process where a disk is full
    torch.jit.save(traced, content, _extra_files={KEY: json.dumps(header)})
    path.write_bytes(content.getvalue())


def _read_torchscript(path: Path) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = torch.jit.load(path).eval()  # type: ignore[no-untyped-call]
    return found


def _batched() -> tuple[dict[int, Any], ...]:
    """The first dimension is free, the others are those of the run's images."""
    return ({0: torch.export.Dim("batch", min=1)},)


def _write_export(model: nn.Module, x: Tensor, header: Header, path: Path) -> None:
    program = torch.export.export(model, (x,), dynamic_shapes=_batched())
    content = io.BytesIO()  # for the same reason
    torch.export.save(program, content, extra_files={KEY: json.dumps(header)})
    path.write_bytes(content.getvalue())


def _read_export(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def _write_onnx(model: nn.Module, x: Tensor, header: Header, path: Path) -> None:
    _need_onnx()
    program = torch.onnx.export(
        model,
        (x,),
        dynamo=True,
        dynamic_shapes=_batched(),
        input_names=["x"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None  # with dynamo it is one
    program.model.metadata_props[KEY] = json.dumps(header)
    program.save(path, external_data=False)


def _read_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    _need_onnx()
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"x": x.numpy()})[0])


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as problem:
        raise InputError(
            f"--to onnx needs the package {problem.name}; install it with: pip install 'elle-at[onnx]'"
        ) from None


_ROWS = (
    Format(
        "safetensors",
        "weights for elle.load; it holds no code",
        ".safetensors",
        _write_safetensors,
        _read_safetensors,
        "import elle\n\n\ndef load_model(path):\n    return elle.load(path)\n",
    ),
    Format(
        "torchscript",
        "network and weights for torch alone, also from C++",
        ".torchscript.pt",
        _write_torchscript,
        _read_torchscript,
        "import torch\n\n\ndef load_model(path):\n    return torch.jit.load(path).eval()\n",
    ),
    Format(
        "torch-export",
        "network and weights for torch alone, to compile or lower further",
        ".pt2",
        _write_export,
        _read_export,
        "import torch\n\n\ndef load_model(path):\n    return torch.export.load(path).module()\n",
    ),
    Format(
        "onnx",
        "network and weights for ONNX Runtime and others; it gives no gradients",
        ".onnx",
        _write_onnx,
        _read_onnx,
        "import onnxruntime\nimport torch\n\n\n"
        "def load_model(path):\n"
        '    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])\n'
        '    return lambda x: torch.from_numpy(session.run(["logits"], {"x": x.cpu().numpy()})[0])\n',
    ),
)
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporters print and warn about on their way: deprecations, packages they can do without."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

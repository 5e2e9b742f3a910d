"""`elle export`: parse and dispatch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elle.cli.options import AsJson, Root, RunDirectory
from elle.cli.printing import print_json


def export(
    directory: RunDirectory,
    to: Annotated[str, typer.Option(help="safetensors, torchscript, torch-export or onnx.")] = "safetensors",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: DIR/exported/model with the format's suffix.")
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="Licence of the weights, for the model card.")
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained network for other programs.

    It takes images in [0, 1] and returns logits. A model card is written beside it.

    elle keeps the file only if, read back, its logits agree with the network's on test images.

    Example: elle export runs/digits-elle-a-eps0.2-seed0 --to onnx
    """
    from elle.export.write import export_run

    found = export_run(directory, to, out, root=root, licence=licence)
    if as_json:
        print_json(found)
        return
    print(f"{found['file']} ({found['bytes'] / 2**20:.1f} MiB)")
    print(
        f"read back, on {found['images']} test images: logits differ by at most {found['max_difference']:.1e} "
        f"(largest {found['largest_logit']:.2g}), the same class for {found['same_class']}"
    )
    print(f"model card: {found['card']}")

"""`elle methods`, `elle models`, `elle datasets` and `elle doctor`: what there is."""

from __future__ import annotations

from dataclasses import asdict

from elle.cli.data import list_datasets
from elle.cli.options import AsJson
from elle.cli.printing import print_json, print_rows, print_table


def methods(as_json: AsJson = False) -> None:
    """List the training methods.

    Any method without ELLE's penalty also takes +elle or +elle-a.

    Example: elle methods --json
    """
    from elle.methods import METHODS

    rows = METHODS.values()
    if as_json:
        print_json(
            [
                {"name": row.name, "paper": row.paper, **asdict(row.cost), "cost": row.cost.total}
                | {"double_backpropagation": row.double_backpropagation, "needs": row.needs, "collapse": row.collapse}
                for row in rows
            ]
        )
        return
    columns = ["name", "paper", "passes", "needs", "collapse, as the paper reports it"]
    print_table(columns, [[row.name, row.paper, str(row.cost), row.needs, row.collapse] for row in rows])
    print("passes for each image and step: forwards + input gradients + weight gradients")
    print("pgd-K for any K; any row without ELLE's penalty takes +elle or +elle-a (3+3+3 more), for example gat+elle-a")


def models(as_json: AsJson = False) -> None:
    """List the networks with their parameters and GFLOP.

    GFLOP are for the forward pass of one image; a multiply-add is two operations.

    You can also use timm:NAME, torchvision:NAME, or your own module:function, called with num_classes=K.

    Example: elle models
    """
    from elle.models.registry import MODELS

    rows = [
        {
            "name": row.name,
            "parameters": row.parameters,
            "gflop": row.gflop,
            "image": "x".join(map(str, row.shape)),
            "classes": row.classes,
            "description": row.description,
        }
        for row in MODELS.values()
    ]
    print_rows(rows, as_json)


def datasets(as_json: AsJson = False) -> None:
    """List the datasets and their default settings.

    Example: elle datasets
    """
    list_datasets(as_json)


def doctor(as_json: AsJson = False) -> None:
    """Show what elle finds on this machine, and what is missing.

    Example: elle doctor
    """
    from elle.doctor import examine

    rows = examine()
    if as_json:
        print_json(rows)
    else:
        print_table(["", "found", "what to do"], [[row["what"], row["found"], row["advice"]] for row in rows])

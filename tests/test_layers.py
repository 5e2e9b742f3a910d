"""The direction of imports, as a table: what each room may import of elle. Nothing points back."""

import ast
from pathlib import Path

import pytest

import elle

SOURCE = Path(elle.__file__).parent

ALLOWED: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "signals": set(),
    "files": {"errors"},
    "core": set(),
    "data": {"errors", "version"},
    "models": {"core", "errors"},
    "plugin": {"core", "models"},
    "charts": set(),
    "published": set(),
    "methods": {"core", "errors", "published"},
    "config": {"core", "data", "errors", "published"},
    "evaluation": {"core", "errors", "files", "models", "version"},
    "experiments": {"charts", "config", "core", "data", "errors", "files", "methods", "signals"},
    "engine": {"config", "core", "data", "errors", "evaluation", "files", "methods", "models", "signals", "version"},
    "export": {"config", "data", "engine", "errors", "files", "version"},
    "doctor": {"data", "errors", "version"},
    "demo": {"charts", "config", "data", "errors", "experiments", "files"},
    "cli": {
        "charts", "config", "data", "demo", "doctor", "engine", "errors", "evaluation", "experiments", "export",
        "files", "methods", "models", "version",
    },
    "__init__": {"core", "engine", "evaluation", "methods", "plugin", "version"},
    "__main__": {"cli"},
}  # fmt: skip
WITHOUT_TORCH = {
    "version", "errors", "signals", "files", "charts", "published", "config", "experiments", "demo", "cli", "__init__",
}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(file: Path, top_level_only: bool = False) -> set[str]:
    """Every module named in an import statement, `from elle import x` counted as elle.x."""
    tree = ast.parse(file.read_text())
    nodes = _run_at_import(tree) if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"elle.{alias.name}" for alias in node.names} if node.module == "elle" else {node.module or ""}
    return names


def _run_at_import(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_only_what_its_row_allows(file):
    rooms = {name.split(".")[1] for name in imported(file) if name.startswith("elle.")}
    assert rooms - {room(file)} <= ALLOWED[room(file)]


@pytest.mark.parametrize("file", sorted((SOURCE / "core").rglob("*.py")), ids=lambda file: file.name)
def test_core_knows_torch_and_the_standard_library_alone(file):
    # A folder of core is one piece: its files may import one another.
    own = "elle." + ".".join(file.parent.relative_to(SOURCE).parts)
    inside = {name for name in imported(file) if file.parent.name != "core" and name.startswith(own)}
    outside = {name.split(".")[0] for name in imported(file) - inside} - {"torch"}
    assert not {name for name in outside if name in ("elle", "numpy", "pydantic", "typer", "rich", "sklearn")}


@pytest.mark.parametrize("file", [f for f in FILES if room(f) in WITHOUT_TORCH], ids=lambda file: file.name)
def test_what_starts_at_once_does_not_import_torch(file):
    slow = {name.split(".")[0] for name in imported(file, top_level_only=True)}
    assert not slow & {"torch", "sklearn", "safetensors"}


def test_every_room_is_in_the_table():
    assert {room(file) for file in FILES} == set(ALLOWED)


def test_there_is_no_utils():
    assert not [file for file in FILES if "util" in file.stem or "helper" in file.stem]

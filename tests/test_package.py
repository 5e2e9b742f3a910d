"""What a user installs: the wheel's contents, its names, its one version."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import elle

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    assert [file.name for file in out.glob("*.tar.gz")] == [f"elle_at-{elle.__version__}.tar.gz"]
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_every_module_the_images_and_the_type_marker(wheel):
    expected = {f"elle/{file.relative_to(ROOT / 'src/elle')}" for file in (ROOT / "src/elle").rglob("*.py")}
    expected |= {f"elle/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.toml")}
    assert "elle/recipes/table-2.toml" in expected
    assert expected | {"elle/py.typed", "elle/data/mnist5k.npz"} <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if "test" in name or name.endswith(".pyc")]


def test_the_wheel_carries_the_licence_the_command_and_the_version(wheel):
    folder = f"elle_at-{elle.__version__}.dist-info"
    assert "elle = elle.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert f"Version: {elle.__version__}" in wheel.read(f"{folder}/METADATA").decode()
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_version_is_written_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert "version" not in project


def test_every_public_name_resolves_and_others_do_not():
    assert all(getattr(elle, name) is not None for name in elle.__all__)
    assert set(dir(elle)) == set(elle.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ELE'"):
        _ = elle.ELE


USER_S_LOOP = """
import elle
from torch import Tensor, nn

def penalty(reg: elle.ELLE, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x_adv = elle.attacks.fgsm(model, x, y, eps=8 / 255)
    return reg(model, x_adv, y) + reg(lambda points: nn.functional.relu(points), x, y) + reg.error

def wrong(reg: elle.ELLE, model: nn.Module, x: Tensor, y: Tensor) -> None:
    reg(model, x)
    elle.evalute(model, x, y)
    elle.ELLE(eps=8 / 255, norm="l7")
"""


def test_a_type_checker_passes_a_user_s_loop_and_finds_its_mistakes(tmp_path):
    (tmp_path / "loop.py").write_text(USER_S_LOOP)
    # From the root: the project's settings, and the cache that `make lint` has filled.
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "loop.py")]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout.splitlines()
    assert [line.split("loop.py:")[1].split(": error: ")[0] for line in found[:-1]] == ["10", "11", "12"], found
    assert ['"y"' in found[0], '"evalute"' in found[1], '"norm"' in found[2]] == [True] * 3, found

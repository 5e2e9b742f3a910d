"""A sweep whose finished runs are kept under an object path: copied, fetched, told about when that fails."""

import shutil
from types import SimpleNamespace

import pytest

from elle.config import load_config
from elle.errors import WorkError
from elle.experiments.object_path import ObjectPath
from elle.experiments.sweep import MANIFEST, Item

from .recipes import tiny_recipe

ONE = ("--only", "method=fgsm", "eps=0.1")


@pytest.fixture
def made(tmp_path):
    """A run that looks finished, in a sweep's folder."""
    path = tmp_path / "runs" / "one"
    for name in ("config.toml", "result.json", "checkpoints/step-1.safetensors", "images/a.png", ".lock"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}" if name.endswith("json") else "")
    (path.parent / MANIFEST).write_text("{}")
    return Item(load_config(["method=fgsm", "data=digits", "epochs=1"]), path, "finished")


def files(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_what_is_finished_here_or_there_is_soon_in_both(made, tmp_path):
    there = tmp_path / "bucket" / "runs"
    ObjectPath(there.as_uri()).even_out(made.path.parent, [made])
    kept = ["one/config.toml", "one/images/a.png", "one/result.json"]
    assert files(there) == [*kept, MANIFEST]
    shutil.rmtree(made.path)
    made.state = "waiting"
    ObjectPath(there.as_uri()).even_out(made.path.parent, [made])
    assert made.state == "finished"
    assert files(made.path.parent) == [*kept, MANIFEST]


@pytest.mark.parametrize("name", ["../../outside", "images/../../../outside", "{root}/outside"])
def test_an_object_whose_name_leaves_its_run_is_not_fetched(made, tmp_path, name):
    store = ObjectPath((tmp_path / "bucket").as_uri())
    store.put(made)
    place, real = f"{tmp_path}/bucket/one", store._files

    class Bucket:
        def get_file_info(self, _):
            return [SimpleNamespace(path=f"{place}/{name.format(root=tmp_path)}", type=store._fs.FileType.File)]

        def open_input_stream(self, _):
            return real.open_input_stream(f"{place}/result.json")

    store._files = Bucket()
    with pytest.raises(WorkError, match="outside', which leaves the folder of its run; remove it there"):
        store._fetch(made)
    assert not list(tmp_path.rglob("outside"))


def test_half_a_run_does_not_count(made, tmp_path):
    there = tmp_path / "bucket"
    store = ObjectPath(there.as_uri())
    (made.path / "result.json").rename(tmp_path / "result.json")
    store.put(made)
    assert not store.holds(made)
    (tmp_path / "result.json").rename(made.path / "result.json")
    store.put(made)
    assert store.holds(made)


def test_a_copy_that_fails_is_told_later_and_stops_nothing(made, tmp_path):
    there = tmp_path / "bucket"
    store = ObjectPath(there.as_uri())
    there.mkdir()
    (there / "one").write_text("a file where the run would go")
    store.follow(made)
    assert "config.toml could not be copied to" in str(store.problem)
    assert "the same command tries again" in str(store.problem)
    with pytest.raises(WorkError, match="could not be copied"):
        store.even_out(made.path.parent, [made])


def test_another_machine_goes_on_with_the_same_command(elle, tmp_path, monkeypatch):
    recipe, there = tiny_recipe(tmp_path, epochs=1), tmp_path / "bucket"
    command = ("sweep", recipe, *ONE, "--out", there.as_uri())
    for machine in ("first", "second"):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        if machine == "second":
            assert "1 finished; nothing was started" in elle(*command, "--dry-run").out
            assert not (tmp_path / machine / "runs").exists()
        done = elle(*command)
        assert done.code == 0, done.err
        assert f"1 run in runs/tiny and in {there.as_uri()} is finished: elle report {recipe}" in done.out
    (log,) = (tmp_path / "second" / "runs" / "tiny").glob("*/train.log")
    assert log.read_bytes() == next(there.glob("*/train.log")).read_bytes()  # copied, not made again
    assert elle("report", recipe).code == 0


@pytest.mark.parametrize("url", ["s3://", "s4://bucket/runs", "file://elsewhere/runs"])
def test_an_address_that_is_none_is_refused_in_one_line(elle, tmp_path, url):
    wrong = elle("sweep", tiny_recipe(tmp_path), "--out", url)
    assert wrong.code == 2
    assert f"--out {url}: " in wrong.err
    assert wrong.err.strip().endswith("write a folder, or s3://BUCKET/PATH")
    assert wrong.err.count("\n") == 1

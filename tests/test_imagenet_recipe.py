"""Table 1's recipe is the paper's ImageNet run, the documented command is a run of it, and a small one completes."""

import json
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from elle.config import load_config
from elle.experiments.recipe import load_recipe, run_id
from elle.methods import configured

ROOT = Path(__file__).parents[1]


def test_the_documented_command_is_a_run_of_the_recipe():
    text = (ROOT / "docs" / "imagenet.md").read_text().replace("\\\n", "")
    (line,) = [line for line in text.splitlines() if "phases=6:" in line and line.startswith("elle train")]
    config = load_config([word for word in line.split() if "=" in word and not word.startswith("devices=")])
    (run,) = load_recipe("table-1").runs(1, only={"method": config.method, "eps": "2/255"})
    assert run_id(config) == run_id(run)


@pytest.mark.parametrize("run", load_recipe("table-1").runs(1), ids=lambda run: f"{run.method}-{round(255 * run.eps)}")
def test_every_run_has_the_settings_of_the_paper_and_its_scripts(run):
    whole = run.resolved()
    assert (whole.model, whole.schedule, whole.lr) == ("resnet50", "imagenet-15", 0.4)
    assert whole.phases == ((6, 128, 512), (6, 224, 224), (3, 288, 128))
    assert (whole.weight_decay, whole.decay_norm, whole.clip) == (1e-4, False, True)
    assert whole.final == "clean,pgd-50-10"
    method = configured(
        whole.method, weight=whole.weight, clip=True, data=whole.data, eps=whole.eps, options=whole.options
    )
    if method.penalty:
        assert (method.weight.history, method.regulariser.power, method.regulariser.clip) == (500, "smooth-l1", True)
        assert (method.weight.value, method.weight.ramp) == ((20_000, 2500) if "n-fgsm" in run.method else (10_000, 0))


def test_a_rehearsal_keeps_what_the_recipe_says_of_the_training(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    args = Namespace(method="n-fgsm+elle-a", eps="8/255", images=4096, shrink=4, model=None, workers=0)
    small = import_module("imagenet").scaled(args, tmp_path, tmp_path)
    assert small.phases == ((6, 32, 128), (3, 56, 56), (2, 72, 32))
    assert small.options["weight"] == {"history": 500, "ramp": 32}
    (run,) = load_recipe("table-1").runs(1, only={"method": args.method, "eps": args.eps})
    assert small.resolved().differences(run.resolved()) == [
        *("options", "epochs", "phases", "batch", "lr", "image_size", "validation")
    ]
    assert small.lr == 0.4 / 4 / 8


def test_a_small_run_of_the_recipe_completes_in_three_phases(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(import_module("results"), "FOLDER", tmp_path)
    network = "--model tests.networks:any_size_net --workers 0 --save"
    import_module("imagenet").main(f"--images 32 --test 4 --classes 2 --shrink 16 {network}".split())
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    *epochs, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == result
    seventh_cut = [*range(1, 8), *range(7, 12)]
    assert [json.loads(line)["epoch"] for line in epochs] == seventh_cut
    assert [(row["epochs"], row["image_size"], row["batch"]) for row in result["phases"]] == [
        (6, 8, 32),
        (3, 14, 14),
        (2, 18, 8),
    ]
    # 32 images less 2 held out: one batch, of all, then two of 14, then three of 8; cut after one of the second phase.
    assert (result["resumed_at_step"], result["steps"]) == (7, 6 * 1 + 3 * 2 + 2 * 3)
    assert set(result["accuracy"]) == {"clean", "pgd-50-10"}

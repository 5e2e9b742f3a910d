"""`elle export`: the file computes what the network does, its card tells the truth, and its snippet runs."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import elle as package
from elle.config import load_config
from elle.engine.checkpoint import read_tensors
from elle.engine.loop import train
from elle.engine.trained import load_run
from elle.errors import WorkError
from elle.export.formats import FORMATS
from elle.export.write import export_run

from ..conftest import QUICK
from ..data.photographs import write_folder, write_photographs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose network normalises its images, and an evaluation of it."""
    run = tmp_path_factory.mktemp("normalised") / "run"
    train(load_config([*QUICK, "max_steps=6", "normalise=dataset", "final=clean,fgsm", f"out={run}"]))
    return run


@pytest.fixture(scope="module", params=FORMATS)
def exported(request, run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / f"net{FORMATS[request.param].suffix}"
    return export_run(run, request.param, out), out


def test_a_format_gives_the_network_s_logits_from_images_in_0_to_1(exported, run):
    found, out = exported
    assert found["images"] == found["same_class"] == 32
    assert found["max_difference"] < 1e-4
    x, _ = load_run(run).test_images(limit=7)
    network = FORMATS[found["format"]].read(out)
    torch.testing.assert_close(network(x), load_run(run).model(x), rtol=0, atol=1e-4)


def test_the_card_s_code_runs_as_printed(exported, run, monkeypatch):
    _, out = exported
    monkeypatch.chdir(out.parent)
    card = (out.parent / f"{out.name}.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    x, _ = load_run(run).test_images(limit=3)
    names = {"x": x}
    exec(compile(code, "card", "exec"), names)
    expected = load_run(run).model(x).argmax(1).tolist()
    assert names["names"] == [str(k) for k in expected]


@pytest.mark.parametrize("exported", ["safetensors", "torchscript", "torch-export"], indirect=True)
def test_what_torch_loads_has_gradients_so_that_it_can_be_attacked(exported, run):
    x, y = load_run(run).test_images(limit=20)
    gradients = []
    for network in (FORMATS[exported[0]["format"]].read(exported[1]), load_run(run).model):
        points = x.clone().requires_grad_()
        gradients += torch.autograd.grad(nn.functional.cross_entropy(network(points), y), points)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def header_of(path, form):
    said = {"elle": ""}
    if form == "safetensors":
        return read_tensors(path)[1]
    if form == "torchscript":
        torch.jit.load(path, _extra_files=said)
    elif form == "torch-export":
        torch.export.load(path, extra_files=said)
    else:
        import onnxruntime

        said = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    return json.loads(said["elle"])


def test_a_file_says_what_it_is(exported):
    header = header_of(exported[1], exported[0]["format"])
    assert (header["shape"], header["classes"][3], header["normalise"]) == ([1, 8, 8], "3", "dataset")


def test_the_card_states_data_method_eps_accuracies_and_licence(elle, run, tmp_path):
    assert elle("evaluate", run, "--attack", "clean,pgd-2", "--eps", "0.1", "--limit", "50").code == 0
    outcome = elle("export", run, "--out", tmp_path / "m.safetensors", "--licence", "CC BY 4.0", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    card = (tmp_path / "m.safetensors.md").read_text()
    result = json.loads((run / "result.json").read_text())
    assert found["card"] == str(tmp_path / "m.safetensors.md")
    for words in ("`digits`", "`fgsm`, eps 0.3 in linf", "CC BY 4.0", "as its first layer", "[N, 1, 8, 8]"):
        assert words in card
    assert f"| fgsm | 0.3 | {result['test']['fgsm']['accuracy']:.2%} |" in card
    assert re.search(r"\| pgd-2 \| 0\.1 \| [\d.]+% \| .* \| 50 \|", card)
    assert f"at most {found['max_difference']:.1e}" in card


def test_the_card_says_what_a_rollback_made_of_the_method(run_copy, tmp_path):
    rollback = {"event": "rollback", "step": 2, "method": "fgsm+elle-a", "weight": 50.0}
    events = [rollback, rollback | {"step": 3, "weight": 100.0}]
    (run_copy / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = json.loads((run_copy / "result.json").read_text())
    told = []
    for rollbacks in (2, 0):  # none: the run was continued from before it, with --from, and kept its method
        (run_copy / "result.json").write_text(json.dumps(result | {"rollbacks": rollbacks}))
        export_run(run_copy, "safetensors", tmp_path / f"{rollbacks}.safetensors")
        told.append((tmp_path / f"{rollbacks}.safetensors.md").read_text())
    assert "rolled back to step 3, from where on it is `fgsm+elle-a`, lambda 100 |" in told[0]
    assert "rolled back" not in told[1]


def test_an_evaluation_of_other_weights_is_not_quoted(elle, run_copy, tmp_path):
    assert elle("evaluate", run_copy, "--attack", "pgd-2", "--limit", "20").code == 0
    record = json.loads((run_copy / "evaluation.json").read_text())
    (run_copy / "evaluation.json").write_text(json.dumps(record | {"model": record["model"] | {"sha256": "0"}}))
    export_run(run_copy, "safetensors", tmp_path / "m.safetensors")
    assert "pgd-2" not in (tmp_path / "m.safetensors.md").read_text()


def test_an_evaluation_with_other_attacks_does_not_hide_the_one_before(elle, run_copy, tmp_path):
    for attack in ("pgd-2", "pgd-3"):
        assert elle("evaluate", run_copy, "--attack", attack, "--limit", "10").code == 0
    export_run(run_copy, "safetensors", tmp_path / "m.safetensors")
    card = (tmp_path / "m.safetensors.md").read_text()
    assert "| pgd-2 |" in card
    assert "| pgd-3 |" in card


@pytest.mark.parametrize(("changed", "row"), [({"data": {"name": "others"}}, None), ({"norm": "l2"}, "0.3 in l2")])
def test_an_evaluation_is_quoted_only_for_the_run_s_own_data_and_with_its_norm(elle, run_copy, tmp_path, changed, row):
    assert elle("evaluate", run_copy, "--attack", "pgd-2", "--limit", "10").code == 0
    file = run_copy / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    export_run(run_copy, "safetensors", tmp_path / "m.safetensors")
    card = (tmp_path / "m.safetensors.md").read_text()
    assert ("| pgd-2 |" in card) == (row is not None)
    assert row is None or f"| pgd-2 | {row} |" in card


def test_an_evaluation_of_other_images_under_the_same_name_is_not_quoted(elle, tmp_path):
    run = tmp_path / "run"
    for name in ("photos", "others"):
        write_folder(tmp_path / name)
    write_photographs(tmp_path / "others" / "val" / "cat", 4, seed=7)
    words = [
        "data=folder",
        f"root={tmp_path / 'photos'}",
        "image_size=8",
        "model=small-cnn",
        "max_steps=1",
        f"out={run}",
    ]
    train(load_config([*words, "device=cpu", "eval_every=0", "probe_every=0", "final=clean"]))
    for limit in ([], ["--limit", "4"]):
        assert elle("evaluate", run, "--attack", f"pgd-{2 + len(limit)}", *limit).code == 0
    assert elle("evaluate", run, "--attack", "pgd-3", "--root", tmp_path / "others").code == 0
    export_run(run, "safetensors", tmp_path / "m.safetensors")
    card = (tmp_path / "m.safetensors.md").read_text()
    assert re.search(r"\| pgd-2 \|.*\| 8 \|", card)
    assert re.search(r"\| pgd-4 \|.*\| 4 \|", card)
    assert "pgd-3" not in card
    small = "resized to 9 pixels (left as it is where it has fewer, enlarged to 8 below that), its middle 8 x 8 cut out"
    assert small in card


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("result.json", {"test": "none"}),
        ("result.json", {"test": {"clean": {"accuracy": "high", "interval": [0, 1], "total": 3}}}),
        ("evaluation.json", {"attacks": None}),
        ("evaluation.json", {"eps": "large"}),
    ],
)
def test_a_damaged_record_of_accuracies_is_named_in_one_line(elle, run_copy, tmp_path, name, change):
    assert elle("evaluate", run_copy, "--attack", "clean", "--limit", "8").code == 0
    file = run_copy / name
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    outcome = elle("export", run_copy, "--out", tmp_path / "m.safetensors")
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert f"{file} is damaged: its accuracies cannot be read" in outcome.err
    assert not list(tmp_path.glob("m.*"))


def test_clean_accuracy_at_several_radii_is_one_row(elle, run_copy, tmp_path):
    for eps in ("0.1", "0.2"):
        assert elle("evaluate", run_copy, "--attack", "clean", "--limit", "10", "--eps", eps).code == 0
    export_run(run_copy, "safetensors", tmp_path / "m.safetensors")
    assert len(re.findall(r"^\| clean \|.*\| 10 \|$", (tmp_path / "m.safetensors.md").read_text(), re.MULTILINE)) == 1


def test_the_card_of_a_run_cut_short_says_so(run, run_copy, tmp_path):
    with open(run_copy / "config.toml", "a") as config:
        config.write("max_steps = 1000\n")  # more than its two epochs have
    for source, steps in ((run, "1 epoch of batch 64, ended after 6 steps"), (run_copy, "ended after 36 steps")):
        export_run(source, "safetensors", tmp_path / "m.safetensors")
        assert steps in (tmp_path / "m.safetensors.md").read_text()


def test_the_card_says_which_weights_the_training_started_from(run_copy, tmp_path):
    with open(run_copy / "config.toml", "a") as config:
        config.write('init = "downloads/resnet18.pt"\n')
    export_run(run_copy, "safetensors", tmp_path / "m.safetensors")
    assert "of batch 64, from the weights in resnet18.pt, seed 0" in (tmp_path / "m.safetensors.md").read_text()


def test_the_safetensors_file_is_loaded_without_its_run(run, tmp_path):
    export_run(run, "safetensors", tmp_path / "m.safetensors")
    model = package.load(tmp_path / "m.safetensors")
    assert not model.training
    x, _ = load_run(run).test_images(limit=2)
    assert torch.equal(model(x), load_run(run).model(x))


def test_exported_again_it_replaces_the_export_but_no_other_file(elle, run_copy):
    first = elle("export", run_copy)
    assert first.code == 0, first.err
    assert "exported/model.safetensors" in first.out
    assert elle("export", run_copy).code == 0
    before = (run_copy / "model.safetensors").read_bytes()
    outcome = elle("export", run_copy, "--out", run_copy / "model.safetensors")
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert "was not written by `elle export`" in outcome.err
    assert (run_copy / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("folder", ["RUN", ".", "/"])
def test_a_folder_is_refused_as_the_file_to_write(elle, run, folder):
    outcome = elle("export", run, "--out", run if folder == "RUN" else folder)
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert "is a folder; name a file in it" in outcome.err


def test_a_format_that_does_not_exist_is_refused(elle, run):
    outcome = elle("export", run, "--to", "onx")
    assert outcome.code == 2
    assert "did you mean 'onnx'?" in outcome.err


@pytest.mark.parametrize(("to", "name"), [("safetensors", "m.onnx"), ("onnx", "m.pt"), ("torch-export", "m.PT")])
def test_a_name_with_the_ending_of_another_format_is_refused(elle, run, tmp_path, to, name):
    outcome = elle("export", run, "--to", to, "--out", tmp_path / name)
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert f"{name} has the ending of " in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_name_without_an_ending_or_with_one_of_no_format_is_taken(run, tmp_path):
    for name in ("network", "weights.bin"):
        export_run(run, "safetensors", tmp_path / name)
        assert (tmp_path / name).is_file()


def test_without_its_packages_onnx_names_the_extra(elle, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    outcome = elle("export", run, "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert "pip install 'elle-at[onnx]'" in outcome.err
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    """A network that no tracer follows: what it computes depends on the batch's size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        logits = self.linear(x.flatten(1))
        return logits * 2 if len(x) == 2 else logits


def test_a_file_that_computes_something_else_is_not_put_in_place(run, tmp_path, monkeypatch):
    trained = load_run(run)
    trained.__dict__["model"] = Branching().eval()
    monkeypatch.setattr("elle.export.write.load_run", lambda directory: trained)
    with pytest.raises(WorkError, match="gives other logits than the network: they differ by"):
        export_run(run, "torchscript", tmp_path / "m.pt")
    assert not list(tmp_path.iterdir())


def test_images_that_the_file_gives_another_class_are_counted(run, tmp_path, monkeypatch):
    class Undecided(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), 10)

    def read(path):
        return lambda x: torch.eye(10)[[0] if len(x) == 1 else [1] * len(x)] * 1e-6

    trained = load_run(run)
    trained.__dict__["model"] = Undecided()
    monkeypatch.setattr("elle.export.write.load_run", lambda directory: trained)
    monkeypatch.setitem(FORMATS, "safetensors", replace(FORMATS["safetensors"], read=read))
    found = export_run(run, "safetensors", tmp_path / "m.safetensors")
    assert (found["images"], found["same_class"]) == (32, 1)
    assert "the same class for 1 of 32." in (tmp_path / "m.safetensors.md").read_text()


def test_a_network_that_an_exporter_cannot_express_is_said_so_in_one_line(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("unsupported\nat line 2")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(WorkError, match=r"cannot be written as torch-export: unsupported; try another format"):
        export_run(run, "torch-export", tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())

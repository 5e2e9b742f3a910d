"""Runs drawn and compared, from directories made by hand; and the loss surface of a small network."""

import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from elle.charts.heatmap import Heatmap, draw_heatmap
from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.surface import around_collapse, loss_surface
from elle.errors import InputError
from elle.experiments.delayed import delayed_collapse
from elle.experiments.figure import write_figures
from elle.experiments.pictures import course, falls, surface_figures, weight_evolution, write_pictures
from elle.experiments.rundir import open_run, tracked_images, unique_names
from elle.models.registry import build_model
from tests.conftest import QUICK
from tests.experiments.runs import run_directory
from tests.networks import Affine

SURFACE = {
    name: {"step": step, "along": [0.0, 0.5, 1.0], "across": [-1.0, 0.0, 1.0], "loss": [[0.0, high, low]] * 3}
    for name, step, high, low in (("before", 20, 1.0, 2.0), ("after", 40, 9.0, 0.1))
}


def test_a_collapse_is_marked_on_every_chart_of_figure_2(tmp_path):
    run = open_run(run_directory(tmp_path / "fgsm", "method=fgsm", fall=4))
    charts = course([run], ["fgsm"])
    assert [chart.y_label for chart in charts] == ["accuracy", "accuracy", "E_lin", "accuracy"]
    assert {chart.marks[0] for chart in charts} == {(4.0, "collapse")}
    multi = charts[0].series[0]
    assert (multi.x[0], multi.x[-1], multi.y[0], multi.y[-1]) == (0.5, 6.0, 0.4, 0.01)


def test_a_misalignment_that_a_run_has_tracked_has_its_chart(tmp_path):
    path = tmp_path / "run"
    train(load_config([*QUICK, "method=fgsm", "epochs=2", "eval_every=1", "track=clean,misalignment", f"out={path}"]))
    recorded = [json.loads(line)["tracked_misalignment"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    chart = next(chart for chart in course([open_run(path)], ["run"]) if chart.title == "Gradient misalignment")
    assert list(chart.series[0].y) == recorded
    assert len(recorded) == 2


def test_a_run_without_a_monitor_is_drawn_from_its_records(tmp_path):
    path = run_directory(tmp_path / "run", fall=3)
    (path / "probes.jsonl").unlink()
    chart = course([open_run(path)], ["run"])[0]
    assert list(chart.series[0].y) == [0.4, 0.4, 0.01, 0.01, 0.01, 0.01]


def test_what_a_rollback_has_undone_is_drawn_beside_the_run(tmp_path):
    undone = [{"step": 25, "multi": 0.0, "single": 0.9, "error": 0.2, "clean": 0.7}]
    events = [
        {"event": "collapse", "step": 25, "since": 20, "evidence": "it fell"},
        {"event": "rollback", "step": 20, "undone_from": 25, "probes": undone, "method": "fgsm+elle-a"},
    ]
    run = open_run(run_directory(tmp_path / "run", events=events))
    assert [one.name for one in course([run], ["run"])[0].series] == ["run", "run, undone"]
    assert (falls(run), run.collapse_step()) == ([(2.0, "collapse, undone")], None)
    write_pictures(tmp_path / "page.html", [run], {})
    page = (tmp_path / "page.html").read_text()
    assert "2.0 (undone)" in page
    assert "It was undone: back to step 20, from there with fgsm+elle-a." in page
    # The method it was started with has not held, although the run has.
    assert delayed_collapse([run])[0]["first_collapse_epoch"] == 2


def test_a_collapse_that_passed_is_not_drawn_as_one(tmp_path):
    events = [
        {"event": "collapse", "step": 25, "since": 20, "evidence": "it fell"},
        {"event": "recovery", "step": 35, "since": 30, "evidence": "it is back"},
    ]
    run = open_run(run_directory(tmp_path / "run", events=events))
    assert falls(run) == [(2.0, "fall, recovery")]
    write_pictures(tmp_path / "page.html", [run], {})
    page = (tmp_path / "page.html").read_text()
    assert "2.0 (recovered)" in page
    assert "It had recovered at step 35." in re.sub(r"<[^>]+>", "", page).replace("&nbsp;", " ")


def test_a_collapse_that_a_resumed_run_tells_again_is_drawn_once(tmp_path):
    told = {"event": "collapse", "step": 25, "since": 20, "evidence": "it fell"}
    run = open_run(run_directory(tmp_path / "run", events=[told, {"event": "resume", "step": 20}, told]))
    assert (falls(run), run.collapse_step()) == ([(2.0, "collapse")], 20)
    run.events.pop()  # continued from before it, with another method perhaps: it has not come again
    assert (falls(run), run.collapse_step()) == ([], None)


def test_runs_of_one_name_in_folders_of_one_name_are_told_apart(elle, tmp_path, monkeypatch):
    """Copies of a project: the curves had one colour, and the loss surface of the last stood for both."""
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / place / "runs" / "fgsm" for place in ("here", "there")]
    runs = [open_run(run_directory(paths[0], fall=4)), open_run(run_directory(paths[1]))]
    names = ["here/runs/fgsm", "there/runs/fgsm"]
    assert unique_names(runs) == names
    assert unique_names(runs[:1]) == ["fgsm"]
    for command in (("watch", "--once"), ("plot",)):  # one that is named twice is shown once
        assert elle(*command, *map(str, paths), "there/runs/fgsm/").code == 0
    page = (tmp_path / "plot.html").read_text()
    assert "2 runs side by side" in page
    assert [page.count(f'<th scope="row">{name}</th>') for name in names] == [1, 1]


def test_figure_9_has_every_step(tmp_path):
    error, weight = weight_evolution(open_run(run_directory(tmp_path / "a", weight=30.0)), "a")
    assert [len(one.x) for one in (*error.series, *weight.series)] == [60, 60, 60]
    assert (weight.series[0].x[0], weight.series[0].x[-1]) == (1, 60)
    assert weight_evolution(open_run(run_directory(tmp_path / "b")), "b") == []


def test_all_pictures_are_on_one_page_and_each_is_a_file(tmp_path):
    runs = [
        open_run(run_directory(tmp_path / "fgsm", fall=4)),
        open_run(run_directory(tmp_path / "elle-a", weight=3.0)),
    ]
    figures = write_pictures(tmp_path / "page.html", runs, {"fgsm": SURFACE})
    assert len(figures) == 4 + 3 + 2
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == len(figures)
    assert "fgsm collapsed at step 40: it fell." in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    files = [path for path in write_figures(tmp_path / "figures", figures) if path.suffix == ".svg"]
    assert len(files) == len(figures)
    for file in files:
        ET.parse(file)


def test_the_surfaces_of_both_states_have_one_scale():
    line, before, after = surface_figures("fgsm", SURFACE)
    assert [list(one.y) for one in line.series] == [[0.0, 1.0, 2.0], [0.0, 9.0, 0.1]]
    assert (before.low, before.high) == (after.low, after.high) == (0.0, 9.0)
    assert surface_figures("fgsm", None) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_no_numbers_are_grey_and_leave_the_colours_of_the_others(bad):
    """One network that overflows made every cell of both maps as dark as a loss of 0, or ended in an error."""
    states = {"before": [[bad, bad], [bad, bad]], "after": [[0.0, 1.0], [1.0, 2.0]]}
    axes = {"along": [0.0, 1.0], "across": [-1.0, 1.0], "step": None}
    figures = surface_figures("run", {key: axes | {"loss": loss} for key, loss in states.items()})
    drawn = []
    for heatmap in figures[1:]:
        assert isinstance(heatmap, Heatmap)
        rects = [rect for rect in ET.fromstring(draw_heatmap(heatmap)).iter() if rect.tag.endswith("rect")]
        drawn.append([rect.get("fill") for rect in rects if len(rect)])
    assert drawn == [["#b0b0b0"] * 4, ["#440154", "#21918c", "#21918c", "#fde725"]]


def test_the_loss_of_a_linear_network_rises_along_the_attack():
    torch.manual_seed(0)
    model, x, y = Affine(), torch.rand(5, 12), torch.arange(5) % 4
    state = torch.get_rng_state()
    surface = loss_surface(model, x, y, 0.1)
    middle = surface["loss"][len(surface["across"]) // 2]
    assert middle == sorted(middle)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(torch.tensor(middle[0]), torch.nn.functional.cross_entropy(model(x), y))


def test_the_surface_between_two_checkpoints(finished_run, tmp_path):
    checkpoints = sorted((finished_run / "checkpoints").iterdir())
    surfaces = around_collapse(finished_run, torch.device("cpu"), *checkpoints)
    assert [surfaces[name]["step"] for name in ("before", "after")] == [18, 36]
    assert around_collapse(finished_run, torch.device("cpu")) is None
    with pytest.raises(InputError, match="does not exist; give a checkpoint"):
        around_collapse(finished_run, torch.device("cpu"), checkpoints[0], finished_run / "none")
    other = tmp_path / "other.safetensors"
    header = checkpoint.read_tensors(finished_run / "model.safetensors")[1] | {"shape": [1, 16, 16]}
    checkpoint.write_tensors(other, build_model("small-cnn", (1, 16, 16), 10).state_dict(), header)
    with pytest.raises(InputError, match="is for images of 1 x 16 x 16, and its run's are 1 x 8 x 8"):
        around_collapse(finished_run, torch.device("cpu"), other, checkpoints[1])


def test_the_multi_step_figure_says_which_attack_it_shows(tmp_path):
    runs = [open_run(run_directory(tmp_path / name, f"method={name}")) for name in ("fgsm", "pgd-10")]
    assert course(runs, ["a", "b"])[0].note == "On the monitor's probe."
    (tmp_path / "pgd-10" / "probes.jsonl").unlink()
    runs = [open_run(run.path) for run in runs]
    tracked = "under PGD-10 on the test images."
    assert course(runs, ["a", "b"])[0].note == f"On the monitor's probe; where there was no monitor, {tracked}"
    assert course(runs[1:], ["b"])[0].note == f"U{tracked[1:]}"


def test_a_figure_says_which_images_are_tracked(tmp_path):
    held, none = (run_directory(tmp_path / str(count), "method=fgsm", f"validation={count}") for count in (97, 0))
    assert tracked_images([open_run(held)]) == "the held-out training images"
    assert tracked_images([open_run(none)]) == "the test images"
    both = "the held-out training images, or the test images where none were held out"
    assert tracked_images([open_run(held), open_run(none)]) == both


@pytest.mark.parametrize("command", [["watch", "--once"], ["plot", "--out", "x.html"]])
def test_a_folder_that_is_no_run_is_refused(elle, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, words in {"none": "none does not exist", "empty": "empty is not a run directory"}.items():
        outcome = elle(*command, tmp_path / name)
        assert outcome.code == 2
        assert words in outcome.err
    assert not (tmp_path / "x.html").exists()


def test_a_run_that_goes_back_to_stop_there_does_not_go_on(elle, tmp_path):
    fell = {"event": "collapse", "step": 35, "since": 30, "evidence": "it fell", "confidence": "high"}
    back = {"event": "rollback", "step": 20, "undone_from": 35, "probes": [], "method": "fgsm+elle-a", "weight": 600.0}
    stop = {"event": "stop", "step": 20, "reason": "stopped after 1 rollbacks"}
    events = [fell, back | {"goes_on": True}, fell, back | {"goes_on": False}, stop]
    run = run_directory(tmp_path / "run", epochs=2, finished=False, events=events)
    watched = elle("watch", "--once", run).out
    assert "stopped, rolled back 1 x" in watched
    assert watched.count("rolled back from step 35 to 20: now fgsm+elle-a at weight 600\n") == 1
    assert watched.count("rolled back from step 35 to 20\n") == 1
    assert elle("plot", run, "--out", tmp_path / "page.html").code == 0
    assert "It was undone: back to step 20, where the run stopped." in (tmp_path / "page.html").read_text()


def test_a_run_that_ended_early_is_not_drawn_as_one_that_held(elle, tmp_path):
    stop = {"event": "stop", "step": 20, "reason": "training diverged in epoch 2"}
    runs = [run_directory(tmp_path / "a", finished=False, events=[stop]), run_directory(tmp_path / "b", finished=False)]
    assert elle("plot", *runs, "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "a: no collapse. It ended early: training diverged in epoch 2. b: no collapse. It has not finished." in page


def test_a_run_that_was_resumed_has_not_stopped(tmp_path):
    events = [{"event": "stop", "step": 20, "signal": "SIGTERM"}, {"event": "resume", "step": 20}]
    assert open_run(run_directory(tmp_path / "a", finished=False, events=events)).stopped() is None
    assert open_run(run_directory(tmp_path / "b", finished=False, events=events[:1])).stopped() == "SIGTERM"


def test_the_commands_write_and_print(elle, tmp_path):
    run = run_directory(tmp_path / "a", "method=fgsm", fall=4)
    assert elle("plot", run, "--out", tmp_path / "page.html", "--figures", tmp_path / "figures").code == 0
    assert (tmp_path / "page.html").exists()
    assert "holds up to eps" in elle("report", "--delayed", run).out
    assert json.loads(elle("report", "--delayed", run, "--json").out)[0]["first_collapse_epoch"] == 4
    in_folder = elle("report", "--delayed", tmp_path, "--json")
    assert json.loads(in_folder.out)[0]["runs"] == 1, in_folder.err
    assert "there is no folder" in elle("report", "--delayed", tmp_path / "none").err
    assert "writes no file" in elle("report", "--delayed", run, "--out", tmp_path / "x").err
    assert elle("report", run).code == 2
    assert elle("plot", run, "--before", "x").code == 2
    assert "is no .html" in elle("plot", run, "--out", tmp_path / "page.png").err
    for name in ("metrics.jsonl", "probes.jsonl"):
        (run / name).unlink()
    outcome = elle("plot", run, "--out", tmp_path / "empty.html")
    assert (outcome.code, "nothing to draw yet" in outcome.err) == (2, True)
    assert not (tmp_path / "empty.html").exists()


def test_a_file_of_other_bytes_or_that_cannot_be_read_is_named(elle, tmp_path):
    path = run_directory(tmp_path / "run")
    (path / "events.jsonl").write_bytes(b"\xff\xfe\n")
    outcome = elle("watch", "--once", path)
    assert (outcome.code, "events.jsonl is damaged" in outcome.err) == (2, True)
    (path / "events.jsonl").unlink()
    (path / "events.jsonl").mkdir()  # what a root that runs tests cannot read either
    outcome = elle("watch", "--once", path)
    assert (outcome.code, "events.jsonl cannot be read: Is a directory" in outcome.err) == (2, True)


def test_a_damaged_file_is_named(tmp_path):
    path = run_directory(tmp_path / "run")
    (path / "events.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="events.jsonl is damaged"):
        open_run(path)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    path = run_directory(tmp_path / "run")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 7')
    assert len(open_run(path).records) == 6

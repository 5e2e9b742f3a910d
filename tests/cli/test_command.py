"""The command as a user meets it: help with an example, exit codes 0, 1 and 2, one-line errors, JSON for programs."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from elle.cli import app
from elle.config import Config
from elle.data.registry import DATASETS
from elle.doctor import EXTRAS
from elle.engine import checkpoint
from elle.methods import METHODS, find_method
from elle.models.registry import MODELS, build_model
from elle.version import __version__

from ..conftest import QUICK, assert_one_line
from ..data.layouts import write_npz

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.fixture
def train_quickly(elle):
    return lambda *words: elle("train", *QUICK, *words)


def python(*words, **environment):
    command, where = [sys.executable, *words], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=where)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(elle, command):
    outcome = elle(command, "--help")
    assert outcome.code == 0
    assert f"Example: elle {command}" in outcome.out


def test_the_help_lists_every_command(elle):
    outcome = elle("--help")
    assert outcome.code == 0
    assert [name for name in COMMANDS if name not in outcome.out] == []


def test_the_command_alone_prints_its_help(elle):
    outcome = elle()
    assert len([line for line in (outcome.out + outcome.err).splitlines() if line.split()[:1] == ["train"]]) == 1


def test_the_help_of_train_lists_every_key(elle):
    listed = {line.split()[0] for line in elle("train", "--help").out.splitlines() if line.strip()}
    assert [key for key in Config.model_fields if key not in listed] == ["options"]


def test_the_help_of_train_keeps_a_key_on_a_line_of_its_own(elle):
    text = elle("train", "--help").out
    assert "  seed          seed of the weights, the data order and all random draws [0]\n" in text


def test_the_help_of_train_fits_a_terminal_of_80_columns():
    outcome = python("-m", "elle", "train", "--help", COLUMNS="80")
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert "\n                  epoch for attacks of 1 or 2 steps\n" in outcome.stdout  # of probe_every, under its text
    assert python("-m", "elle", "train", "--help", COLUMNS="1").returncode == 0


def test_the_version_is_printed(elle):
    assert elle("--version").out == f"elle {__version__}\n"


def test_python_m_elle_is_the_command():
    outcome = python("-m", "elle", "--version")
    assert (outcome.returncode, outcome.stdout) == (0, f"elle {__version__}\n")


def test_importing_elle_loads_none_of_the_tool():
    code = (
        "import sys, elle; elle.ELLE; print([m for m in ('pydantic', 'typer', 'sklearn', 'rich') if m in sys.modules])"
    )
    assert python("-c", code).stdout == "[]\n"


def test_the_command_starts_without_torch():
    code = "import sys, elle.cli; print([m for m in ('torch', 'sklearn') if m in sys.modules])"
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize(("command", "rows"), [("methods", METHODS), ("models", MODELS), ("datasets", DATASETS)])
def test_a_list_names_every_row_for_people_and_for_programs(elle, command, rows):
    table, listed = elle(command), json.loads(elle(command, "--json").out)
    assert [row["name"] for row in listed] == list(rows)
    assert [name for name in rows if name not in table.out] == []


def test_the_list_of_methods_says_what_can_be_added_to_them(elle):
    last = elle("methods").out.splitlines()[-1]
    passes = find_method("gat+elle-a").cost.forwards - METHODS["gat"].cost.forwards
    assert "pgd-K for any K" in last
    assert f"+elle or +elle-a ({passes}+{passes}+{passes} more)" in last


def test_a_dataset_that_leaves_a_setting_open_keeps_its_columns(elle):
    head, *lines = elle("datasets").out.splitlines()
    folder = next(line for line in lines if line.startswith("folder "))
    assert folder[head.index("eps") :].startswith("4/255 ")
    assert folder[head.index("description") :].startswith("your own images")
    assert "None" not in folder


def test_the_doctor_names_what_is_there_and_what_is_missing(elle, tmp_path, monkeypatch):
    rows = {row["what"]: row for row in json.loads(elle("doctor", "--json").out)}
    assert rows["elle"]["found"] == __version__
    assert rows["data digits"] == {
        "what": "data digits",
        "found": "1297 training and 500 test images",
        "advice": "",
    }
    assert rows["extra tune"] == {"what": "extra tune", "found": f"optuna {version('optuna')}", "advice": ""}
    assert "no folder" in rows["data cifar10"]["found"]
    assert "ELLE_DATA" in rows["data cifar10"]["advice"]
    assert "data cifar10" in elle("doctor").out
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ELLE_DATA", "~/images")
    (tmp_path / "images").mkdir()
    (found,) = [row["found"] for row in json.loads(elle("doctor", "--json").out) if row["what"] == "data cifar10"]
    assert "no folder" not in found


def test_on_a_narrow_terminal_a_text_breaks_and_not_a_name(elle, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    lines = elle("models").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > len(MODELS) + 1
    for row in MODELS.values():
        assert [line for line in lines if line.split()[:2] == [row.name, str(row.parameters)]]


def test_on_a_narrow_terminal_no_name_of_a_method_is_cut_off(elle, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    lines = elle("methods").out.splitlines()[:-2]
    assert max(map(len, lines)) <= 80
    assert set(METHODS) <= {line.split()[0] for line in lines}
    assert not [line for line in lines if "…" in line]


def test_the_doctor_looks_for_every_extra_and_says_how_to_install_one(elle, monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {
        name: [re.match(r"[\w-]+", package)[0] for package in packages]
        for name, packages in project["optional-dependencies"].items()
    }
    assert {name: packages for name, (packages, _) in EXTRAS.items()} | {"dev": declared["dev"]} == declared
    monkeypatch.setitem(EXTRAS, "tune", (["optuna", "not-there"], "searches"))
    (row,) = [row for row in json.loads(elle("doctor", "--json").out) if row["what"] == "extra tune"]
    assert row["advice"] == "for searches: pip install 'elle-at[tune]'"


def test_training_prints_every_epoch_and_where_everything_is(train_quickly, tmp_path):
    outcome = train_quickly("epochs=2", "--out", tmp_path / "run")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(text in outcome.out for text in ("epoch   1/2", "epoch   2/2", "clean", "95 % interval"))
    assert outcome.out.endswith(f"everything is in {tmp_path / 'run'}\n")


def test_training_prints_nothing_but_json_on_request(train_quickly, tmp_path):
    outcome = train_quickly("--out", "run", "--json")
    assert json.loads(outcome.out) == json.loads((tmp_path / "run" / "result.json").read_text())
    assert "epoch   1/1" in outcome.err


def test_training_reads_a_file_that_words_override(elle, tmp_path):
    text = 'data = "digits"\nmethod = "fgsm"\nepochs = 5\ntrack = "clean"\nfinal = "clean"\n'
    (tmp_path / "file.toml").write_text(text)
    result = json.loads(elle("train", "--config", "file.toml", "--out", "run", "max_steps=1", "epochs=1", "--json").out)
    assert (result["steps"], result["config"]["epochs"], result["config"]["method"]) == (1, 1, "fgsm")


def test_training_resumes_with_the_directory_alone(elle, run_copy):
    result = json.loads(elle("train", "--out", run_copy, "--resume", "--json").out)
    assert (result["steps"], result["config"]["method"]) == (36, "fgsm")


def test_a_directory_without_a_run_is_not_resumed(elle, tmp_path):
    outcome = elle("train", "--out", tmp_path / "typo", "--resume")
    assert outcome.code == 2
    assert "typo holds no run to continue" in outcome.err
    assert not (tmp_path / "typo").exists()


def test_training_resumes_with_the_key_out_alone(elle, run_copy):
    outcome = elle("train", f"out={run_copy}", "--resume", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["config"]["method"] == "fgsm"


def test_training_continues_from_the_checkpoint_given(elle, run_copy):
    outcome = elle("train", "--out", run_copy, "--from", run_copy / "checkpoints" / "step-00000018.safetensors")
    assert outcome.code == 0
    assert "continuing from step 18 of 36" in outcome.out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["lerning=3"], "unknown key 'lerning'"),
        (["epoch=3"], "did you mean 'epochs'?"),
        (["eps=8"], "did you mean eps=8/255?"),
        (["fgsm"], "'fgsm' is not key=value"),
        (["out="], "'out=' has no value"),
        (["lr=0"], "lr=0: it should be greater than 0"),
        (["crop=9"], "crop=9 is more padding than images of 8 x 8 pixels"),
        (["weight=3"], "leave it out, or train with fgsm+elle-a"),
        (["--config", "."], "is not a readable TOML file: Is a directory"),
        (["method=fgsn"], "did you mean 'fgsm'?"),
        (["data=digit"], "did you mean 'digits'?"),
        (["model=small"], "did you mean 'small-cnn'?"),
        (["track=pgdd"], "track: attack 'pgdd' does not exist, did you mean 'pgd-20'?"),
        (["track=clean,misalignmen"], "or a metric of `elle metrics`, did you mean 'misalignment'?"),
        (["device=gpu"], "device=gpu is not a device"),
        (["precision=tf32"], "precision=tf32 needs an NVIDIA GPU"),
        (["compile=graph"], "compile=graph needs an NVIDIA GPU"),
        (["--config", "nowhere.toml"], "nowhere.toml does not exist"),
        (["--from", "nowhere.safetensors"], "--from nowhere.safetensors does not exist"),
        (["data=cifar10", "root=nowhere"], "looked in nowhere (no such folder)"),
        (["data=cifar10"], "the folder data is the default, as ELLE_DATA is not set"),
    ],
)
def test_a_mistake_in_the_settings_is_one_line_and_exit_code_2(train_quickly, words, hint):
    outcome = train_quickly(*words)
    assert_one_line(outcome, 2)
    assert hint in outcome.err


@pytest.mark.parametrize("file", ["model.safetensors", "checkpoints"])
def test_a_file_that_is_no_checkpoint_is_what_is_told_not_that_its_folder_is_no_run(elle, finished_run, file):
    outcome = elle("train", "--from", finished_run / file)
    assert_one_line(outcome, 2)
    assert f"{file} is not in a run's checkpoints/" in outcome.err


def test_a_checkpoint_that_is_missing_is_what_is_told_whatever_else_is(elle, tmp_path):
    outcome = elle("train", "--from", "gone/checkpoints/step-1.safetensors", "--out", tmp_path / "no-run")
    assert_one_line(outcome, 2)
    assert "--from gone/checkpoints/step-1.safetensors does not exist" in outcome.err


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["train", "--nonsense"],
        ["evaluate"],
        ["evaluate", "run", "--limit", "0"],
        ["evaluate", "run", "--seed", "x"],
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_command_line_is_one_line_and_exit_code_2(elle, words):
    assert_one_line(elle(*words), 2)


@pytest.mark.parametrize("words", [["compare", "a"], ["train", "--nonsense"], ["data", "get"]], ids=" ".join)
def test_a_mistake_in_the_command_line_points_to_the_help(elle, words):
    command = "data get" if words[0] == "data" else words[0]
    assert elle(*words).err.endswith(f"; see elle {command} --help\n")


@pytest.mark.parametrize("word", ["eps=1e400", "seed=18446744073709551616", "method.attack.alpha=fast"])
def test_an_extreme_value_is_one_line_and_exit_code_2(train_quickly, word):
    assert_one_line(train_quickly(word), 2)


def test_a_label_out_of_range_is_one_line_and_exit_code_2(train_quickly, tmp_path):
    root = write_npz(tmp_path / "data")
    np.savez(root / "test.npz", x=np.zeros((5, 32, 32, 3), np.uint8), y=np.full(5, 10))
    outcome = train_quickly("data=cifar10")
    assert_one_line(outcome, 2)
    assert "test.npz: label 10 is outside 0..9" in outcome.err


def test_an_existing_run_is_one_line_and_exit_code_2(train_quickly, run_copy):
    outcome = train_quickly("epochs=2", "--out", run_copy)
    assert_one_line(outcome, 2)
    assert "--resume" in outcome.err


def test_a_diverged_run_is_one_line_and_exit_code_1(train_quickly):
    outcome = train_quickly("lr=1e6")
    assert_one_line(outcome, 1)
    assert "training diverged in epoch 1" in outcome.err


def test_a_full_disk_is_one_line_and_exit_code_1(train_quickly, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    outcome = train_quickly()
    assert_one_line(outcome, 1)
    assert "No space left on device" in outcome.err


def test_a_stopped_run_is_one_line_and_exit_code_1_and_its_advice_works(train_quickly, elle, monkeypatch):
    from elle.cli.progress import TrainingProgress

    def stop(self, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(TrainingProgress, "_stepped", stop)
        outcome = train_quickly("--out", "run")
    assert_one_line(outcome, 1)
    advice = outcome.err.rpartition("continue with: elle ")[2].split()
    assert advice == ["train", "--out", "run", "--resume"]
    assert "continuing from step 5 of 18" in elle(*advice).out


@pytest.mark.parametrize("words", [["out=~nobody-here/x"], ["data=cifar10", "root=~nobody-here/x"]])
def test_a_home_folder_that_nobody_has_is_one_line_and_exit_code_2(train_quickly, words):
    outcome = train_quickly(*words)
    assert_one_line(outcome, 2)
    assert "~nobody-here/x: whose home folder ~ means is not known here" in outcome.err


def in_shell(line, *words, **options):
    """The command with streams that the shell arranges; `$@` in the line is `elle WORDS`."""
    command = ["bash", "-c", line, "bash", sys.executable, "-m", "elle", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["--version"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(words):
    outcome = in_shell('"$@" > /dev/full', *words)
    assert outcome.returncode == 1
    assert outcome.stderr == "elle: could not print all of the output: No space left on device\n"


def test_output_that_nobody_reads_is_no_error_to_tell():
    outcome = in_shell('"$@" | true', "methods", "--json")
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_closed_streams_are_no_error():
    outcome = in_shell('"$@" <&- >&-', "methods")
    assert (outcome.returncode, outcome.stderr) == (0, "")


@pytest.mark.parametrize(("line", "code"), [('"$@" > /dev/full', 1), ('"$@" | true; exit ${PIPESTATUS[0]}', 0)])
def test_a_training_whose_log_cannot_be_written_goes_on_to_its_end(line, code):
    outcome = in_shell(line, "train", *QUICK, "--out", "run")
    assert outcome.returncode == code
    assert outcome.stderr.count("\n") == code
    assert Path("run/result.json").exists()


def test_a_terminal_without_unicode_shows_a_run_all_the_same(run_copy):
    """The C locale, in which Python itself escapes bytes that are no text, and refuses text that is not ASCII."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii:surrogateescape"}
    outcome = in_shell('"$@"', "watch", "--once", str(run_copy), env=environment)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert r"\u2588" in outcome.stdout


def test_a_file_that_may_not_be_opened_is_one_line_and_exit_code_2(elle, monkeypatch):
    def refuse():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run/config.toml")

    monkeypatch.setattr("elle.doctor.examine", refuse)  # nothing is refused to root
    outcome = elle("doctor")
    assert_one_line(outcome, 2)
    assert outcome.err == "elle: cannot open run/config.toml: Permission denied\n"


def test_a_device_that_is_full_before_the_first_step_is_one_line_and_exit_code_1(train_quickly, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB."
        )

    monkeypatch.setattr("elle.engine.loop.build_parts", full)
    outcome = train_quickly()
    assert_one_line(outcome, 1)
    assert "memory is full (CUDA out of memory. Tried to allocate 2.00 GiB.); see who else uses it" in outcome.err


@pytest.mark.parametrize(
    "problem", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError("Unable to allocate 28.0 GiB")]
)
def test_images_that_do_not_fit_into_memory_are_one_line_and_exit_code_1(train_quickly, monkeypatch, problem):
    def full(*_):
        raise problem

    monkeypatch.setattr("elle.engine.loop.build_parts", full)
    outcome = train_quickly()
    assert_one_line(outcome, 1)
    assert "llocate" in outcome.err
    assert "use smaller images" in outcome.err


def test_ctrl_c_is_one_line_and_exit_code_130(elle, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("elle.doctor.examine", interrupt)
    outcome = elle("doctor")
    assert_one_line(outcome, 130)
    assert outcome.err == "elle: interrupted\n"


def test_evaluating_gives_each_attack_for_programs_and_in_a_file(elle, run_copy):
    outcome = elle("evaluate", run_copy, "--attack", "clean,fgsm,pgd-5,pgd-5-2", "--limit", 50, "--json")
    record = json.loads(outcome.out)
    assert record == json.loads((run_copy / "evaluation.json").read_text())
    assert list(record["attacks"]) == ["clean", "fgsm", "pgd-5", "pgd-5-2"]
    assert {one["total"] for one in record["attacks"].values()} == {50}
    assert record["attacks"]["clean"]["correct"] >= record["attacks"]["pgd-5-2"]["correct"]
    assert (record["eps"], record["norm"], record["seed"]) == (0.3, "linf", 0)


def test_evaluating_prints_a_table_for_people(elle, run_copy):
    outcome = elle("evaluate", run_copy, "--attack", "clean,pgd-2", "--limit", 20)
    assert (outcome.code, outcome.err) == (0, "")
    assert all(text in outcome.out for text in ("clean", "pgd-2", "of 20", "95 % interval"))


def test_evaluating_takes_another_radius_as_a_fraction(elle, run_copy):
    words = ("evaluate", run_copy, "--attack", "fgsm", "--limit", 20, "--json", "--eps")
    assert json.loads(elle(*words, "8/255").out)["eps"] == 8 / 255


@pytest.mark.parametrize(
    "words",
    [
        ("report", "RUN", "--out", "file"),
        ("report", "RUN", "--out", "file/report"),
        ("plot", "RUN", "--out", "file/plot.html"),
        ("plot", "RUN", "--figures", "file"),
        ("show", "RUN", "--out", "file/shown.png"),
        ("export", "RUN", "--out", "file/model.safetensors"),
        ("evaluate", "RUN", "--out", "file"),
        ("data", "get", "mnist", "--root", "file"),
        ("sweep", "table-2", "--dry-run", "--out", "file"),
        ("show-schedule", "short", "--out", "file/short.svg"),
        ("demo", "--out", "file"),
        ("train", "out=file"),
    ],
)
def test_a_file_given_for_a_folder_is_one_line_and_exit_code_2(elle, run_copy, words):
    Path("file").write_text("mine")
    outcome = elle(*(run_copy if word == "RUN" else word for word in words))
    assert_one_line(outcome, 2)
    assert (outcome.out, Path("file").read_text()) == ("", "mine")


@pytest.mark.parametrize(
    "words",
    [
        ("train", "data=digits", "root=elsewhere"),
        ("evaluate", "RUN", "--root", "elsewhere"),
        ("metrics", "RUN", "--root", "elsewhere"),
        ("show", "RUN", "--root", "elsewhere"),
        ("export", "RUN", "--root", "elsewhere"),
        ("data", "check", "digits", "--root", "elsewhere"),
        ("data", "separation", "digits", "--root", "elsewhere"),
    ],
)
def test_a_folder_for_a_set_that_has_none_is_refused_by_every_command(elle, run_copy, words):
    outcome = elle(*(run_copy if word == "RUN" else word for word in words))
    assert_one_line(outcome, 2)
    assert "root=elsewhere: digits comes with the installation" in outcome.err


@pytest.mark.parametrize("command", ["evaluate", "metrics", "show", "export"])
def test_the_weights_of_another_run_are_named_by_every_command(elle, run_copy, command):
    header = checkpoint.read_tensors(run_copy / "model.safetensors")[1] | {"shape": [1, 28, 28]}
    other = build_model("small-cnn", (1, 28, 28), 10).state_dict()
    checkpoint.write_tensors(run_copy / "model.safetensors", other, header)
    outcome = elle(command, run_copy)
    assert_one_line(outcome, 2)
    assert "model.safetensors is for images of 1 x 28 x 28, and its run's are 1 x 8 x 8" in outcome.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line_and_exit_code_2(elle, run_copy, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert_one_line(elle("report", run_copy, "--out", tmp_path / "closed"), 2)


@pytest.mark.parametrize("command", ["evaluate", "metrics"])
def test_a_folder_that_is_no_run_is_one_line_and_exit_code_2(elle, tmp_path, command):
    outcome = elle(command, tmp_path)
    assert_one_line(outcome, 2)
    assert "has no config.toml" in outcome.err


def test_metrics_are_given_for_people_and_for_programs(elle, run_copy):
    words = ("metrics", run_copy, "--limit", 30, "--metric", "error,misalignment")
    record = json.loads(elle(*words, "--json").out)
    assert (record["eps"], record["seed"]) == (0.3, 0)
    assert list(record["metrics"]) == ["error", "misalignment"]
    assert all(one["count"] + one["undefined"] == 30 for one in record["metrics"].values())
    table = elle(*words)
    assert table.code == 0
    assert "misalignment" in table.out


def test_an_unknown_metric_is_one_line_and_exit_code_2(elle, run_copy):
    outcome = elle("metrics", run_copy, "--metric", "eror")
    assert_one_line(outcome, 2)
    assert "did you mean 'error'" in outcome.err


@pytest.mark.parametrize("command", ["evaluate", "metrics", "show"])
def test_a_seed_that_no_generator_takes_is_one_line_and_exit_code_2(elle, run_copy, command):
    outcome = elle(command, run_copy, "--seed", 2**64)
    assert_one_line(outcome, 2)
    assert "--seed" in outcome.err


@pytest.mark.parametrize("command", ["train", "evaluate", "metrics"])
def test_json_is_strict(elle, run_copy, command):
    words = {"train": ["--out", run_copy, "--resume"]}.get(command, [run_copy, "--limit", 5])

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(elle(command, *words, "--json").out, parse_constant=refuse)


@pytest.mark.parametrize(
    ("policy", "count", "expected"), [(None, None, "3000"), ("active", None, None), (None, "7", "7")]
)
def test_threads_wait_for_each_other_by_sleeping_unless_the_user_says_how(elle, monkeypatch, policy, count, expected):
    for name, value in (("OMP_WAIT_POLICY", policy), ("GOMP_SPINCOUNT", count)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert elle("--version").code == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected

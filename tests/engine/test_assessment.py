"""An evaluation in a directory survives its process, any sharing out, and the next evaluation there."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from elle.engine import assessment
from elle.engine.assessment import PARTS, Job, assess_run
from elle.engine.subject import Source, load_subject
from elle.errors import InputError, WorkError
from elle.evaluation.evaluate import device_name
from elle.evaluation.units import Settings

CPU = torch.device("cpu")
ATTACKS = "clean,fgsm,pgd-5-2"


def job(run, attack=ATTACKS, count=100, keep=False, **settings):
    return Job(Source(str(run)), attack, Settings(0.3, chunk=20, **settings), count, keep)


def assessed(task, out, devices=("cpu",), **rest):
    return assess_run(task, load_subject(task.source, CPU, task.count), out, list(devices), **rest)


def outcome(record):
    """What must be identical: everything but times."""
    attacks = {name: {k: v for k, v in one.items() if k != "seconds"} for name, one in record["attacks"].items()}
    return attacks, record["checks"], record["identity"]


@pytest.fixture(scope="module")
def whole(finished_run, tmp_path_factory):
    """An evaluation without interruption."""
    return assessed(job(finished_run), tmp_path_factory.mktemp("whole"))


def test_killed_and_resumed_is_uninterrupted(finished_run, whole, tmp_path):
    words = ["evaluate", finished_run, "--attack", ATTACKS, "--limit", 100, "--chunk", 20, "--out", tmp_path]
    # Slowed down, so that it is killed in the middle and not before or after.
    slow = "import time; from elle.evaluation.units import Files; save = Files.save\n"
    slow += "def slowly(*a): save(*a); time.sleep(0.3)\n"
    slow += f"Files.save = slowly; import sys; sys.argv = {['elle', *map(str, words)]!r}\n"
    slow += "from elle.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", slow])
    while len(list((tmp_path / PARTS).glob("*.npz"))) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / PARTS).glob("*.npz")}
    assert 5 <= len(done) < 15
    with pytest.raises(InputError, match=f"unfinished evaluation .{len(done)} units done.; continue it with --resume"):
        assessed(job(finished_run), tmp_path)
    kept = []
    remove = assessment.shutil.rmtree

    def look(path, **rest):
        kept.extend(path for path, written in done.items() if path.stat().st_mtime_ns == written)
        remove(path, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assessment.shutil, "rmtree", look)
        record = assessed(job(finished_run), tmp_path, resume=True)
    assert outcome(record) == outcome(whole)
    assert set(kept) == set(done), "a unit that was done was done again"
    assert not (tmp_path / PARTS).exists()


def test_two_workers_give_what_one_gives(finished_run, whole, tmp_path):
    record = assessed(job(finished_run), tmp_path, devices=["cpu", "cpu"])
    assert outcome(record) == outcome(whole)


def test_a_signal_saves_what_is_done_and_says_how_to_go_on(finished_run, whole, tmp_path):
    def stop(done, total):
        if done == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(WorkError, match="stopped by SIGTERM; 4 of 15 units are saved; .* --resume"):
        assessed(job(finished_run), tmp_path, watch=stop)
    assert outcome(assessed(job(finished_run), tmp_path, resume=True)) == outcome(whole)


@pytest.fixture
def unfinished(finished_run, tmp_path):
    def stop(done, total):
        if done == 4:
            raise WorkError("stopped")

    with pytest.raises(WorkError, match="stopped"):
        assessed(job(finished_run), tmp_path, watch=stop)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "words"),
    [({"seed": 1}, "seed=0"), ({"engine": "reference"}, "engine=fast"), ({"batch": 7}, "batch=1024")],
)
def test_another_evaluation_does_not_continue_it(finished_run, unfinished, change, words):
    with pytest.raises(InputError, match=words):
        assessed(job(finished_run, **change), unfinished, resume=True)


def test_more_attacks_continue_from_the_same_units(finished_run, unfinished):
    record = assessed(job(finished_run, "clean,fgsm,pgd-5-2,pgd-3"), unfinished, resume=True)
    assert list(record["attacks"]) == ["clean", "fgsm", "pgd-5-2", "pgd-3"]


@pytest.mark.parametrize("damage", ["other", "empty", "hole"])
def test_a_damaged_unit_is_done_again(finished_run, unfinished, whole, damage):
    unit = next((unfinished / PARTS).glob("*.npz"))
    content = unit.read_bytes()
    # A BadZipFile, an EOFError and zlib's own error.
    damaged = {"other": b"PK\x03\x04 not much", "empty": b"", "hole": content[:60] + bytes(9) + content[69:]}
    unit.write_bytes(damaged[damage])
    assert outcome(assessed(job(finished_run), unfinished, resume=True)) == outcome(whole)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_parts_of_nobody_knows_what_are_not_continued(finished_run, unfinished, content):
    (unfinished / "evaluation.parts" / "identity.json").write_text(content)
    with pytest.raises(InputError, match="identity.json is damaged; delete"):
        assessed(job(finished_run), unfinished, resume=True)


def test_resuming_what_is_finished_reads_it(finished_run, tmp_path):
    first = assessed(job(finished_run, "clean"), tmp_path)
    assert assessed(job(finished_run, "clean"), tmp_path, resume=True) == first


def test_a_record_is_not_lost_to_the_next_one(finished_run, tmp_path):
    first = assessed(job(finished_run, "clean,fgsm"), tmp_path)
    assessed(job(finished_run, "clean,fgsm"), tmp_path)
    assert not (tmp_path / "evaluation.1.json").exists(), "the same evaluation needs no second copy"
    assessed(job(finished_run, "clean"), tmp_path)
    assert json.loads((tmp_path / "evaluation.1.json").read_text())["attacks"].keys() == first["attacks"].keys()


@pytest.mark.parametrize("keep", [True, False])
def test_saved_examples_stay_with_their_record(finished_run, tmp_path, keep):
    assessed(job(finished_run, "fgsm", keep=True), tmp_path)
    images = {file.name: file.read_bytes() for file in (tmp_path / "adversarial").iterdir()}
    assessed(job(finished_run, "pgd-2", keep=keep), tmp_path)
    assert {file.name: file.read_bytes() for file in (tmp_path / "adversarial.1").iterdir()} == images
    assert (tmp_path / "adversarial").exists() == keep
    assert json.loads((tmp_path / "evaluation.1.json").read_text())["attacks"].keys() == {"fgsm"}


def test_a_record_names_weights_data_and_hardware(finished_run, whole):
    digest = subprocess.run(
        ["sha256sum", finished_run / "model.safetensors"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert whole["model"]["sha256"] == digest
    assert whole["model"]["name"] == "small-cnn"
    assert whole["model"]["config"]["method"] == "fgsm"
    assert (whole["data"]["name"], whole["data"]["count"]) == ("digits", 100)
    assert whole["class_names"] == list("0123456789")
    assert len(whole["devices"]) == 1


def test_a_record_names_the_processor_where_linux_tells_it(monkeypatch):
    told = "processor\t: 0\nmodel name\t: Quick 9000: 2 GHz\nprocessor\t: 1\nmodel name\t: Quick 9000: 2 GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/cpuinfo": told}[str(path)])
    assert device_name(CPU) == "Quick 9000: 2 GHz"
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert device_name(CPU) in (platform.processor(), platform.machine())


def test_saved_examples_are_what_was_counted(finished_run, tmp_path):
    record = assessed(job(finished_run, "clean,fgsm", keep=True), tmp_path)
    subject = load_subject(Source(str(finished_run)), CPU)
    files = sorted((tmp_path / "adversarial").glob("fgsm.*.npz"))
    index, x_adv = [], []
    for file in files:
        with np.load(file) as arrays:
            index.append(arrays["index"])
            x_adv.append(arrays["x_adv"])
    rows, points = np.concatenate(index), torch.from_numpy(np.concatenate(x_adv))
    assert len(rows) == record["attacks"]["clean"]["correct"] - record["attacks"]["fgsm"]["correct"] > 0
    assert (points - torch.from_numpy(subject.test.x[rows]) / 255).abs().max() <= 0.3 + 1e-6
    assert (subject.model(points).argmax(1).numpy() != subject.test.y[rows]).all()


def test_a_checkpoint_is_evaluated_beside_its_run(finished_run):
    (*_, last) = sorted(Path(finished_run, "checkpoints").iterdir())
    source = Source(str(last))
    assert source.place == finished_run / "evaluations" / last.stem
    subject, run = load_subject(source, CPU), load_subject(Source(str(finished_run)), CPU)
    x = torch.from_numpy(run.test.x[:8]) / 255
    assert torch.equal(subject.model(x), run.model(x))
    assert (subject.eps, subject.data) == (run.eps, run.data)

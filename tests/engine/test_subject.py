"""What is evaluated: a network with the test images that belong to it."""

import numpy as np
import pytest
import torch

from elle.config import load_config
from elle.engine.loop import train
from elle.engine.subject import Source, load_subject
from elle.engine.trained import load_run
from elle.errors import InputError
from tests.data.photographs import write_folder

CPU = torch.device("cpu")


def test_image_files_are_shown_to_a_network_as_large_as_in_its_training(tmp_path, finished_run):
    root, run = str(write_folder(tmp_path / "photos")), tmp_path / "run"
    words = ["data=folder", f"root={root}", "model=preact-resnet18", "image_size=8", "max_steps=1", f"out={run}"]
    train(load_config([*words, "device=cpu", "eval_every=0", "probe_every=0", "final=clean"]))
    weights, cpu = str(run / "model.safetensors"), torch.device("cpu")
    foreign = load_subject(Source(model="preact-resnet18", weights=weights, data="folder", root=root), cpu)
    assert foreign.test.x.shape[1:] == (3, 8, 8)
    with pytest.raises(InputError, match="--data folder has images 3x8x8 in 2 classes, and the network .* 1x8x8 in 10"):
        load_subject(Source(str(finished_run), data="folder", root=root), cpu)
    with pytest.raises(InputError, match="--data digits has images 1x8x8 in 10 classes, and the network .* 3x8x8 in 2"):
        load_subject(Source(str(run), data="digits"), cpu)


@pytest.fixture(scope="module")
def photos_run(tmp_path_factory):
    """A run on a folder of photographs, of which eight, four cats and then four dogs, are the test."""
    place = tmp_path_factory.mktemp("photos-run")
    root, run = str(write_folder(place / "photos")), place / "run"
    words = ["data=folder", f"root={root}", "model=preact-resnet18", "image_size=8", "max_steps=1", f"out={run}"]
    train(load_config([*words, "device=cpu", "eval_every=0", "probe_every=0", "final=clean"]))
    return run


def test_a_limit_leaves_no_class_out_of_a_set_that_lies_class_by_class(photos_run):
    everything = load_subject(Source(str(photos_run)), CPU)
    some = load_subject(Source(str(photos_run)), CPU, 4)
    assert some.test.y.tolist() == [0, 0, 1, 1]
    assert some.numbers.tolist() == [0, 2, 4, 6]
    assert (some.test.x == everything.test.x[some.numbers]).all()
    x, y = load_run(photos_run).test_images(limit=2)
    assert y.tolist() == [0, 1]
    assert torch.equal(x, torch.from_numpy(everything.test.x[[0, 4]]) / 255)


def test_a_limit_takes_the_first_images_of_a_set_that_lies_in_any_order(finished_run):
    subject = load_subject(Source(str(finished_run)), CPU, 50)
    assert subject.numbers.tolist() == list(range(50))
    assert (subject.test.x == load_subject(Source(str(finished_run)), CPU).test.x[:50]).all()


def test_a_run_s_own_data_named_again_is_looked_at_as_closely(photos_run, tmp_path):
    other = write_folder(tmp_path / "photos")
    for split in ("train", "val"):
        (other / split / "dog").rename(other / split / "bird")
    for data in (None, "folder"):
        with pytest.raises(InputError, match="was trained on other classes: 'dog' is missing and 'bird' is new"):
            load_subject(Source(str(photos_run), data=data, root=str(other)), CPU)


def test_the_same_classes_in_another_order_are_refused(photos_run, tmp_path):
    x = np.zeros((4, 8, 8, 3), np.uint8)
    for split in ("train", "test"):
        np.savez(tmp_path / f"{split}.npz", x=x, y=np.array([0, 1, 0, 1]))
    weights = str(photos_run / "model.safetensors")
    sources = [
        Source(str(photos_run), data="arrays", root=str(tmp_path)),
        Source(model="preact-resnet18", weights=weights, data="arrays", root=str(tmp_path)),
    ]
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    for source in sources:
        with pytest.raises(InputError, match="in another order: its class 0 is 'dog', and the network's is 'cat'"):
            load_subject(source, CPU)
    (tmp_path / "classes.txt").write_text("kitten\npuppy\n")
    for source in sources:
        assert load_subject(source, CPU).classes == ("kitten", "puppy")

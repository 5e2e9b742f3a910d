"""The scale of half-precision gradients comes back after an overflow, and the records say that it fell."""

from elle.engine import checkpoint
from elle.engine.loop import Run
from elle.engine.watcher import Watcher


def test_every_epoch_doubles_a_scale_that_fell(settings, tmp_path):
    run = Run(settings("method=elle-a", "epochs=3", "precision=fp16").resolved(), tmp_path / "run", Watcher())
    run.directory.mkdir()
    (run.directory / "config.toml").write_text(run.config.to_toml())
    assert run.step.scale is not None
    start = float(run.step.scale.value)
    run.step.scale.value.fill_(start / 4)  # as behind two steps whose gradients overflowed
    run.finish()
    assert [record.get("loss_scale") for record in run.history] == [start / 4, start / 2, None]
    tensors, _ = checkpoint.load_checkpoint(max(checkpoint.checkpoints(run.directory)))
    assert tensors["scale"] == start


def test_an_overflow_leaves_the_step_out_and_halves_the_scale(settings, tmp_path):
    run = Run(settings("method=fgsm", "epochs=1", "precision=fp16").resolved(), tmp_path / "run", Watcher())
    assert run.step.scale is not None
    before = [value.clone() for value in run.step.model.parameters()]
    run.step.scale.value.fill_(2.0**120)
    run.run_step(run.batches.index(0))
    assert run.step.scale.value == 2.0**119
    assert all(value.equal(old) for value, old in zip(run.step.model.parameters(), before, strict=True))

"""What stands beside the progress bar while a run trains."""

from elle.engine.monitor import Verdict
from elle.progress import TrainingProgress


def test_the_bar_names_what_is_the_matter_as_long_as_it_is():
    progress = TrainingProgress()
    watcher, (task,) = progress.watcher(), progress.bar.tasks
    watcher.looked({"step": 20}, "collapse")
    watcher.judged(Verdict("collapse", 20, 15, "it fell", "high"))
    assert task.description == "collapse, step 15"
    watcher.looked({"step": 25}, "collapse")
    assert task.description == "collapse, step 15"
    watcher.looked({"step": 20}, None)  # the first look after a rollback
    assert task.description == "training"
    watcher.judged(Verdict("recovery", 40, 35, "it is back", "medium"))
    assert task.description == "training"

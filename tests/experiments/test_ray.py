"""A sweep on a real Ray of two nodes, one of which is killed in the middle: nothing is lost, nothing made twice."""

import json
import threading
import time

import pytest

from elle.experiments.recipe import load_recipe
from elle.experiments.rundir import open_run
from elle.experiments.sweep import plan, run_sweep

from .recipes import tiny_recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster():
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=1), made.add_node(num_cpus=1)]
    made.wait_for_nodes()
    yield made, nodes
    ray.shutdown()
    made.shutdown()


def test_a_lost_node_costs_nothing_but_the_epoch_under_way(cluster, tmp_path):
    from elle.experiments.ray_cluster import RayExecutor

    made, nodes = cluster
    recipe = load_recipe(tiny_recipe(tmp_path, epochs=40))
    items = plan(recipe.runs(1), tmp_path / "out")
    executor = RayExecutor(made.address, cpus=1, gpus=0, retries=3, every=0.5)
    submitted: dict[str, int] = {}
    start = executor.start

    def counted(item):
        submitted[item.name] = submitted.get(item.name, 0) + 1
        start(item)

    executor.start = counted
    killed = []

    def show(item):
        trained = [one for one in items if one.state == "running" and 0 < one.epochs_done < 30]
        if not killed and any(one.state == "finished" for one in items) and len(trained) == 2:
            killed.append({one.name: one.epochs_done for one in trained})
            threading.Thread(target=made.remove_node, args=(nodes[0],), kwargs={"allow_graceful": False}).start()

    started = time.monotonic()
    run_sweep(items, executor, show)
    assert killed, "no node was killed"
    assert [item.state for item in items] == ["finished"] * 4, time.monotonic() - started
    again = [name for name, count in submitted.items() if count == 2]
    assert sorted(submitted.values()) == [1, 1, 1, 2]
    assert again[0] in killed[0]
    for item in items:
        run = open_run(item.path)
        assert [record["epoch"] for record in run.records] == list(range(1, 41))
        kinds = [event["event"] for event in run.events]
        assert kinds == (["resume", "finish"] if item.name in again else ["finish"])
    resumed = next(event for event in open_run(tmp_path / "out" / again[0]).events if event["event"] == "resume")
    assert resumed["step"] > 0
    # The same sweep once more has nothing left to do.
    assert [item.state for item in plan(recipe.runs(1), tmp_path / "out")] == ["finished"] * 4
    assert json.loads((items[0].path / "result.json").read_text())["steps"] > 0

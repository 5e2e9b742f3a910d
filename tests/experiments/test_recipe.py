"""Recipes: every one loads, expands to its stated count, carries the paper's numbers, and names its runs for good."""

import re

import pytest

from elle.config import load_config, nested, parse_config
from elle.errors import InputError
from elle.evaluation.names import parse_attacks
from elle.experiments import recipe as recipe_module
from elle.experiments.estimate import gpu_hours
from elle.experiments.recipe import Expected, load_recipe, matches, recipe_files, run_id
from elle.methods import configured
from elle.models.registry import MODELS

COUNTS = {
    "figure-1": (42, 29),
    "figure-2": (4, 0),
    "figure-3": (864, 0),
    "figure-4": (498, 6),
    "figure-5": (60, 40),
    "figure-6": (3, 0),
    "figure-7": (285, 0),
    "figure-8": (267, 0),
    "figure-9": (6, 0),
    "figure-11": (5, 1),
    "figure-13": (117, 1),
    "figure-14": (6, 0),
    "figure-15": (16, 0),
    "figure-16": (24, 3),
    "figure-17": (9, 4),
    "figure-18a": (1, 0),
    "figure-18b": (117, 0),
    "figure-19": (160, 0),
    "shortcuts": (18, 0),
    "speedrun": (5, 2),
    "table-1": (24, 16),
    "table-2": (576, 192),
    "table-3": (48, 32),
}
"""Runs, and numbers that the paper prints."""

MINIMAL = 'title = "Mine"\n[base]\ndata = "digits"\n[grid]\nmethod = ["fgsm", "elle-a"]\n'


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "mine.toml").write_text(text)
        return tmp_path / "mine.toml"

    return write


def test_there_is_a_recipe_for_every_table_and_figure_the_speedrun_and_the_shortcuts():
    assert set(recipe_files()) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_a_recipe_expands_to_its_stated_count_of_different_runs(name):
    recipe = load_recipe(name)
    runs = recipe.runs()
    assert (len(runs), len(recipe.expected)) == COUNTS[name]
    assert len({run_id(run) for run in runs}) == len(runs)
    assert recipe.runs(2) == [run for run in recipe.runs(2) if run.seed in (0, 1)]


@pytest.mark.parametrize("name", COUNTS)
def test_the_header_has_the_command_the_hardware_and_the_time(name):
    head = recipe_files()[name].read_text().partition("title =")[0]
    assert f"elle sweep {name}\n" in head
    said = re.search(r"One NVIDIA H200: (\d+) runs?, about (\d+) (hour|minute)s?\b", head)
    hours = gpu_hours(load_recipe(name).runs())
    assert int(said[1]) == COUNTS[name][0]
    assert int(said[2]) == pytest.approx(hours * {"hour": 1, "minute": 60}[said[3]], abs=0.51)


@pytest.mark.parametrize("name", COUNTS)
def test_every_run_of_a_recipe_is_one_that_can_be_trained(name):
    for run in load_recipe(name).runs(1):
        whole = run.resolved()
        configured(
            whole.method,
            weight=whole.weight,
            clip=bool(whole.clip),
            data=whole.data,
            eps=whole.eps,
            model=whole.model,
            options=whole.options,
        )
        assert whole.model in MODELS
        assert {one.name for one in parse_attacks(whole.final)}


@pytest.mark.parametrize(
    ("name", "where", "metric", "value", "std", "collapsed"),
    [
        ("table-2", {"data": "svhn", "eps": "12/255", "method": "n-fgsm"}, "autoattack", 21.18, 0.33, False),
        ("table-2", {"data": "svhn", "eps": "12/255", "method": "n-fgsm+elle-a"}, "autoattack", 26.35, 0.23, False),
        ("table-2", {"data": "svhn", "eps": "8/255", "method": "gradalign"}, "autoattack", 27.92, 19.63, True),
        ("table-2", {"data": "cifar10", "eps": "8/255", "method": "elle-a"}, "autoattack", 44.32, 0.04, False),
        ("table-2", {"data": "cifar10", "eps": "20/255", "method": "pgd-10"}, "autoattack", 13.55, 7.11, False),
        ("table-2", {"data": "cifar100", "eps": "26/255", "method": "n-fgsm"}, "autoattack", 1.17, 1.65, True),
        ("figure-1", {"eps": "16/255", "method": "gradalign"}, "clean", 44.35, 15.32, False),
        ("figure-1", {"eps": "8/255", "method": "elle-a"}, "seconds", 60 * 6.29, None, False),
        ("figure-4", {"model": "wide-resnet-28-10", "eps": "26/255", "method": "n-fgsm"}, "pgd-20", 0, 0, True),
        ("figure-5", {"model": "wide-resnet-28-10", "eps": "26/255", "method": "n-fgsm"}, "clean", 27.96, 9.36, True),
        ("figure-11", {"method": "n-fgsm"}, "pgd-20", 0, None, True),
        ("figure-13", {"method": "n-fgsm", "eps": "18/255"}, "pgd-20", 0, None, True),
        ("figure-16", {"method": "elle"}, "pgd-20", 17.80, None, False),
        ("figure-16", {"method": "gradalign", "method.loss.weight": 8}, "pgd-20", 10, None, False),
        ("figure-17", {"method": "no-attack+elle", "eps": "12/255"}, "pgd-20", 5.07, None, False),
        ("table-1", {"eps": "8/255", "method": "n-fgsm+elle-a"}, "pgd-50-10", 14.58, 1.10, False),
        ("table-3", {"eps": "16/255", "method": "advmixup-single+elle-a"}, "clean", 56.64, 6.81, False),
        ("table-3", {"eps": "8/255", "method": "trades-single"}, "autoattack", 0.01, 0.01, True),
    ],
)
def test_the_numbers_are_the_paper_s(name, where, metric, value, std, collapsed):
    recipe = load_recipe(name)
    found = [one for one in recipe.expected if one.metric == metric and where.items() <= one.where.items()]
    assert [(one.value, one.std, one.collapsed) for one in found] == [(pytest.approx(value), std, collapsed)]
    assert len([run for run in recipe.runs() if matches(run, found[0].where)]) == recipe.seeds


def test_a_number_is_the_mean_of_three_runs_but_where_the_paper_draws_a_single_one():
    seeds = {name: {one.seeds for one in load_recipe(name).expected} for name in COUNTS if COUNTS[name][1]}
    assert seeds == {name: {1} if name in ("figure-11", "figure-13", "figure-17") else {3} for name in seeds}


def test_the_shortcuts_are_compared_with_the_run_of_table_2():
    """So that it is not trained twice; and one default that stood in a shortcut's options would be another run."""
    recipe = load_recipe("shortcuts")
    default = [run_id(run) for run in recipe.runs() if not run.options and run.fused == "auto"]
    assert default == [run_id(run) for run in load_recipe("table-2").runs(only={"data": "cifar10", "eps": "8/255",
                                                                                "method": "elle-a"})]  # fmt: skip
    weights = [{"every": 2}, {"every": 4}, {"negligible": 0.01, "next_step": True}]
    options = [{"weight": weights[0]}, {"weight": weights[1]}, {"regulariser": {"share": 0.5}}, {"weight": weights[2]}]
    assert [run.options for run in recipe.runs(1)] == [{}, {}, *options]
    assert recipe.figure["baseline"] == "elle-a"


def test_lambda_is_the_paper_s_for_each_setting():
    weights = {
        (run.method, run.data, round(255 * run.eps)): run.resolved().weight for run in load_recipe("table-2").runs(1)
    }
    assert weights["elle", "cifar10", 8] == 1_000
    assert weights["elle", "cifar10", 26] == 10_000
    assert weights["n-fgsm+elle-a", "svhn", 8] == 5_000
    assert weights["pgd-10", "svhn", 8] is None
    gat = {run.model: run.resolved().weight for run in load_recipe("figure-5").runs(1) if run.method == "gat+elle-a"}
    assert gat == {"preact-resnet18": 10_000, "wide-resnet-28-10": 50_000}


def test_runs_are_chosen_by_settings_that_a_dataset_fills_in():
    recipe = load_recipe("table-2")
    chosen = recipe.runs(1, only={"eps": "8/255", "method": "elle-a", "epochs": 15})
    assert [(run.data, run.eps) for run in chosen] == [("svhn", 8 / 255)]
    with pytest.raises(
        InputError, match="no run of recipe table-2 has eps=9/255; its runs differ in data, eps, method"
    ):
        recipe.runs(only={"eps": "9/255"})
    with pytest.raises(InputError, match="no run of recipe table-2 has eps=8, did you mean eps=8/255"):
        recipe.runs(only={"eps": 8})
    with pytest.raises(InputError, match="unknown key 'epsilon', did you mean 'eps'"):
        recipe.runs(only={"epsilon": "9/255"})


def test_tables_of_runs_share_the_grid_and_override_its_axes(written):
    recipe = load_recipe(written(MINIMAL + '[[runs]]\neps = ["1/255", "2/255"]\n[[runs]]\nmethod = "gradalign"\n'
                                           '"method.loss.weight" = [0.5, 1]\n'))  # fmt: skip
    found = [(run.method, run.eps and round(255 * run.eps), run.options) for run in recipe.runs(1)]
    strong, weak = ({"loss": {"weight": weight}} for weight in (1, 0.5))
    plain = [(method, eps, {}) for method in ("fgsm", "elle-a") for eps in (1, 2)]
    assert found == [*plain, ("gradalign", None, weak), ("gradalign", None, strong)]


def test_a_methods_field_without_quotes_counts_like_one_with_them(written):
    """TOML reads it as a table, in the place of which the grid's method stood: the field was lost without a word."""
    recipe = load_recipe(written('title = "Mine"\n[base]\ndata = "digits"\nmethod.attack.noise = 3\n'
                                 '[[runs]]\nmethod = "n-fgsm"\n'
                                 '[[runs]]\nmethod = [{name = "fgsm", attack = {noise = 1}}]\n'
                                 '[[runs]]\nmethod.name = "gradalign"\nmethod.loss.weight = [0.5, 1]\n'
                                 '[[expected]]\nwhere = { method.loss.weight = 1 }\n'
                                 'metric = "clean"\nvalue = 3\n'))  # fmt: skip
    noise = {"attack": {"noise": 3}}
    assert [(run.method, run.options) for run in recipe.runs(1)] == [
        ("n-fgsm", noise),
        ("fgsm", {"attack": {"noise": 1}}),
        ("gradalign", noise | {"loss": {"weight": 0.5}}),
        ("gradalign", noise | {"loss": {"weight": 1}}),
    ]


def test_an_identity_depends_on_what_is_trained_and_on_nothing_else():
    words = ["data=digits", "method=elle-a", "eps=0.2", "seed=3"]
    own = run_id(load_config(words))
    assert own == run_id(load_config(words[::-1])) == run_id(load_config(words).resolved())
    assert own == run_id(load_config([*words, "out=there", "root=x", "device=cpu", "compile=off", "workers=2"]))
    fields = {"method": "gradalign", "method.loss.weight": 1, "method.attack.clip": False}
    assert run_id(parse_config(nested(fields))) == run_id(parse_config(nested(dict(reversed(fields.items())))))
    assert len({run_id(parse_config(nested({"method.loss.weight": number}))) for number in (1, 1.0)}) == 1
    others = ["seed=4", "eps=0.3", "weight=3", "max_steps=5", "final=clean", "method.weight.decay=0.5"]
    assert len({own, *(run_id(load_config([*words, other])) for other in others)}) == 1 + len(others)


def test_another_folder_of_own_images_is_another_run_wherever_it_lies():
    first, moved, other = (run_id(load_config(["data=folder", f"root={root}"])) for root in ("a/x", "/b/x", "a/y"))
    assert first == moved != other


def test_an_identity_is_the_same_tomorrow():
    assert run_id(load_config(["data=cifar10", "method=elle-a", "eps=8/255"])) == "56dfbeb7211d"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "epsilon = ['8/255']\n", "unknown key 'epsilon', did you mean 'eps'"),
        (MINIMAL.replace("[base]", "[bass]"), "unknown key 'bass', did you mean 'base'"),
        (MINIMAL + "eps = []\n", "the grid's eps is empty"),
        ('title = "x"\n[base]\ndata = "digits"\n', "the grid is empty"),
        (MINIMAL + "eps = [8]\n", "did you mean eps=8/255"),
        (MINIMAL.replace("digits", "digts"), "no dataset 'digts', did you mean 'digits'"),
        ("seeds = 0\n" + MINIMAL, "seeds = 0"),
        (MINIMAL.replace('title = "Mine"\n', ""), "no title"),
        (MINIMAL + "[[expected]]\nwhere = { method = 'llr' }\nmetric = 'clean'\nvalue = 1\n", "no run has method=llr"),
        (MINIMAL + "[[expected]]\nmetric = 'clean'\nvalue = 'many'\n", "'many'"),
        (MINIMAL + "[[expected]]\nmetric = 'clean'\n", "an expected table needs"),
        (MINIMAL + "[[expected]]\nmetric = 'clean'\nvalue = 1\nwere = { seed = 1 }\n", "unknown key 'were'"),
        (MINIMAL + "[[expected]]\nmetric = 'clean'\nvalue = 1\ntable = 'x'\n", "it has metric, table, value"),
        (MINIMAL + "[[expected]]\nmetric = 'clean'\nvalue = 1\nseeds = 0\n", "seeds = 0 must be"),
        (MINIMAL + "[[expected]]\nmetric = 'clean'\nvalue = '5 +- 1'\nseeds = 1\n", "one run has no +-"),
        (MINIMAL + "[figure]\nkind = 'line'\n", "kind = 'line', did you mean 'lines'?"),
        (MINIMAL + "[figure]\nmetrics = ['clean']\n", "unknown key 'metrics', did you mean 'metric'?"),
        (MINIMAL + "[figure]\nx = 'epsilon'\n", "unknown key 'epsilon', did you mean 'eps'"),
        (MINIMAL + "[figure]\nrows = 'seed'\n", "seed is no axis"),
        (MINIMAL + "[figure]\nx = [[1]]\n", "x = [[1]]; write one name"),
        (MINIMAL + "[figure]\nmetric = 3\n", "metric = 3; write names, one or a list of them"),
        (MINIMAL + "[figure]\nrows = ['method', 'eps']\n", "rows = ['method', 'eps']; write one name"),
        (MINIMAL + "[figure]\nat = '0.9'\n", "at = '0.9': no run has eps=0.9"),
        (MINIMAL + "[figure]\nbaseline = 'fgms'\n", "baseline = 'fgms': no run has method=fgms, did you mean 'fgsm'?"),
        (MINIMAL + "[figure]\nline = 'method.weight.evry'\n", "no run sets method.weight.evry"),
        (MINIMAL + "[[expected]]\nwhere = 'x'\nmetric = 'clean'\nvalue = 1\n", "where must be a table"),
        (MINIMAL + "[[expected]]\nrows = 'eps'\ncolumns = 'metric'\ntable = ''\n", "a line that names its metric"),
        (MINIMAL + "[[expected]]\nrows = 'eps'\ncolumns = 'metric'\ntable = 3\n", "a line that names its metric"),
        (MINIMAL + "seed = [1, 2]\n", "leave seed out: seeds = 3"),
        (MINIMAL.replace("[base]", "[base]\nout = 'here'"), "leave out out: `elle sweep --out DIR`"),
        (MINIMAL + "root = ['a', 'b']\n", "runs that differ in root alone (root=a, root=b) count as the same run"),
        ("grid = 3\n" + MINIMAL.partition("[grid]")[0], "grid must be a table"),
        ("title = ", "not a readable TOML file"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line_that_names_the_file(written, text, words):
    file = written(text)
    with pytest.raises(InputError, match=re.escape(words)) as problem:
        load_recipe(file)
    assert str(problem.value).startswith(str(file))
    assert "\n" not in str(problem.value)


def test_a_grid_of_millions_of_runs_is_refused_before_it_is_expanded(written):
    axis = [k / 1000 for k in range(1, 1000)]
    file = written(MINIMAL + "".join(f"{key} = {axis}\n" for key in ("lr", "momentum", "average", "weight_decay")))
    with pytest.raises(InputError, match="more than 10,000; write several recipes"):
        load_recipe(file)


def test_seeds_without_number_are_refused_before_they_are_expanded():
    with pytest.raises(InputError, match="more than 10,000"):
        load_recipe("table-2").runs(10**30)


def test_a_line_of_an_expected_table_has_a_number_for_each_column(written):
    table = '[[expected]]\nmetric = "clean"\nrows = "method"\ncolumns = "seed"\ntable = """\n| 0 | 1\nfgsm | 3\n"""\n'
    with pytest.raises(InputError, match="the expected line 'fgsm' has 1 numbers for 2 columns"):
        load_recipe(written(MINIMAL + table))


def test_an_expected_table_may_have_rows_of_numbers(written):
    table = "[[expected]]\nrows = 'epochs'\ncolumns = 'metric'\ntable = '''\nx | clean\n2 | 3\n1 | 4\n'''\n"
    found = load_recipe(written(MINIMAL + "epochs = [1, 2]\n" + table)).expected
    assert found == [Expected({"epochs": 2}, "clean", 3.0), Expected({"epochs": 1}, "clean", 4.0)]


def test_a_table_of_a_method_takes_more_fields_from_the_grid(written):
    text = MINIMAL.replace("[grid]", "[base.method]\nname = 'gradalign'\n[base.method.loss]\nnorm = 'cosine'\n[grid]")
    recipe = load_recipe(written(re.sub("method = .*", "'method.loss.weight' = [1, 2]", text)))
    assert [run.options["loss"] for run in recipe.runs(1)] == [{"norm": "cosine", "weight": k} for k in (1, 2)]


def test_a_number_is_read_with_its_deviation_and_its_mark(written):
    table = '[[expected]]\nrows = "method"\ncolumns = "metric"\ntable = """\nx | clean | pgd-20\n' \
            'fgsm | 80 | 0.10 +- 0.2 collapsed\nelle-a | - | 40.5\n"""\n'  # fmt: skip
    assert load_recipe(written(MINIMAL + table)).expected == [
        Expected({"method": "fgsm"}, "clean", 80.0),
        Expected({"method": "fgsm"}, "pgd-20", 0.1, 0.2, True),
        Expected({"method": "elle-a"}, "pgd-20", 40.5),
    ]


def test_a_name_that_is_no_recipe_is_answered_with_the_nearest(monkeypatch):
    with pytest.raises(InputError, match="no recipe 'table2', did you mean 'table-2'"):
        load_recipe("table2")
    monkeypatch.setattr(recipe_module, "FOLDERS", ())
    with pytest.raises(InputError, match="no recipe 'table-2'; `elle recipes` lists them"):
        load_recipe("table-2")


def test_hours_grow_with_what_a_run_does():
    def hours(*words):
        return gpu_hours([load_config(["data=cifar10", "method=fgsm", "final=clean", *words])])

    # Measured, in ms a step: 3.264 for FGSM, 6.696 for ELLE-A, 11.037 for GradAlign, 18.14 for the wide network.
    assert hours() * 3600 == pytest.approx(30 * 382 * 0.003264, rel=0.02)
    assert hours("method=elle-a") * 3600 == pytest.approx(30 * 382 * 0.006696, rel=0.02)
    assert hours("model=wide-resnet-28-10") == pytest.approx(hours() * 18.14 / 3.264, rel=0.02)
    assert hours("max_steps=382") == pytest.approx(hours("epochs=1"), rel=0.01)
    assert hours("method=gradalign") == pytest.approx(hours() * 11.037 / 3.264, rel=0.02)
    assert hours("phases=15:16:128,15:32:128") == pytest.approx((1 / 4 + 1) / 2 * hours(), rel=0.01)
    assert hours("final=autoattack") > hours("final=pgd-20") > hours()


@pytest.mark.parametrize(
    ("words", "penalty"),
    [
        (["method.weight.every=4"], 1 / 4),
        (["method.regulariser.share=0.25"], 1 / 4),
        (["method.weight.every=2", "method.regulariser.share=0.5"], 1 / 4),
        (["method.regulariser.form=2p", "method.regulariser.power=1"], 2 / 3),
        (["method.regulariser.samples=2"], 2),
    ],
)
def test_hours_count_the_penalty_as_often_as_its_settings_ask_for_it(words, penalty):
    def hours(*words):
        return gpu_hours([load_config(["data=cifar10", "final=clean", *words])])

    plain, whole = hours("method=fgsm"), hours("method=elle-a")
    assert hours("method=elle-a", *words) - plain == pytest.approx(penalty * (whole - plain))

"""What every page says can be typed: links lead somewhere, commands parse, and settings exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from elle.cli import app
from elle.config import KEYS, load_config, parse_config, parse_words
from elle.core.attacks import SignStep
from elle.errors import InputError
from elle.evaluation.metrics import METRICS, parse_metrics
from elle.evaluation.names import parse_attacks, parse_tracked
from elle.experiments.recipe import load_recipe
from elle.methods import METHODS, configured, find_method

ROOT = Path(__file__).parent.parent
PAGES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = typer.main.get_command(app)


def typed(page: str) -> list[str]:
    """The lines of a page's code blocks without a language, comments cut off, continued lines joined."""
    blocks = [text for language, text in FENCED.findall(PAGES[page]) if not language]
    blocks += re.findall(r"^ {4}.*\n", FENCED.sub("", PAGES[page]), re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", "".join(blocks)).splitlines()
    return [re.sub(r"\s{2,}#.*", "", line).strip() for line in lines]


def spans(page: str) -> list[str]:
    """A page's `code` within sentences and tables."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", PAGES[page]))]


def of_elle(lines: list[str]) -> list[list[str]]:
    """The arguments of each `elle` command, also after a variable, && or torchrun."""
    commands = [part for line in lines for part in re.split(r"\s+&&\s+", line)]
    commands = [re.sub(r"^(?:[A-Z_]+=\S+\s+|torchrun .*-m\s+)", "", command) for command in commands]
    return [shlex.split(command)[1:] for command in commands if command.startswith("elle ")]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    seen = 0
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), (page, target)
            assert not anchor or anchor in anchors(file.read_text()), (page, target)
            seen += 1
    assert seen > 20


def test_every_page_is_reached_from_the_readme():
    for page in PAGES:
        assert page == "README.md" or f"]({page}" in PAGES["README.md"], page


def parse_command(arguments: list[str]) -> tuple[str, dict]:
    """The command's name and parameters, as typer reads them; a usage error is raised."""
    command, names = COMMAND, []
    while hasattr(command, "commands"):
        names.append(arguments[0])
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return " ".join(names), command.make_context(names[-1], [word for word in arguments if word != "..."]).params


def check_settings(words: list[str]) -> None:
    config = load_config(words).resolved()
    configured(config.method, weight=config.weight, norm=config.norm, options=config.options)
    parse_attacks(config.final, config.norm)
    parse_tracked(",".join(name for name in config.track.split(",") if name not in METRICS))


def check_command(arguments: list[str]) -> None:
    name, values = parse_command(arguments)
    if name == "train":
        check_settings(values["words"] or [])
    elif name == "tune" and "=" in values["words"][0]:
        check_settings(values["words"])
    elif name in ("sweep", "tune") and (recipe := (values.get("recipe") or values["words"][0])) != "mine.toml":
        words = [*(values.get("only") or []), *(values["words"] if name == "sweep" else values["words"][1:])]
        assert load_recipe(recipe).runs(1, parse_words([word for word in words if word]))
    if "attack" in values:
        parse_attacks(values["attack"], values.get("norm") or "linf")
    if "metric" in values and values["metric"] != "all":
        parse_metrics(values["metric"])
    if "methods" in values and values["methods"] != "all":
        assert all(find_method(method) for method in values["methods"].split(","))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page):
    in_sentences = [span for span in spans(page) if len(span.split()) > 3 and not set(span) & set("[|")]
    for arguments in of_elle([*typed(page), *in_sentences]):
        check_command(arguments)


def test_the_commands_are_found():
    found = [len(of_elle(typed(page))) for page in PAGES]
    assert sum(found) > 70
    assert sum(count > 0 for count in found) > 10


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_named_in_a_sentence_exists(page):
    fields = {
        (slot, field)
        for method in METHODS.values()
        for slot, part in vars(method).items()
        if hasattr(part, "__dataclass_fields__")
        for field in part.__dataclass_fields__
    }
    for span in spans(page):
        for word in span.split() if re.fullmatch(r"([\w.]+=\S+ ?)+", span) else []:
            key = word.partition("=")[0]
            if key in KEYS and not re.search(r'=([A-Z]+$|True$|[\w.-]*[("])', word):
                parse_config(parse_words([word]))
            elif key.startswith("method."):
                assert tuple(key.split(".")[1:]) in fields, (page, word)


@pytest.mark.parametrize("page", PAGES)
def test_every_script_exists_and_knows_its_options(page):
    for line in [*typed(page), *spans(page)]:
        if script := re.match(r"python (benchmarks/\w+\.py)", line):
            source = (ROOT / script[1]).read_text()
            assert all(f'"{option}"' in source for option in re.findall(r"--[\w-]+", line)), line


def test_no_command_is_cut_off_in_the_list_of_commands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in (COMMAND, COMMAND.commands["data"]):
        listed = command.get_help(command.make_context("elle", [], resilient_parsing=True)).partition("Commands:")[2]
        assert len(listed.strip().splitlines()) >= len(command.commands)
        assert all(line.endswith(".") and not line.endswith("...") for line in listed.strip().splitlines()), listed


def test_every_example_of_a_help_page_parses():
    commands = [COMMAND.commands[name] for name in COMMAND.commands if name != "data"]
    commands += COMMAND.commands["data"].commands.values()
    for command in commands:
        text = " ".join((command.help or "").replace("\b", "").split())
        example = re.search(r"Example: elle (.*?)(?= Keys:|$)", text)
        assert example, command.name
        check_command(shlex.split(example[1]))


def test_the_recipe_of_the_page_could_be_run(tmp_path, elle):
    (text,) = (text for language, text in FENCED.findall(PAGES["docs/recipes.md"]) if language == "toml")
    (tmp_path / "mine.toml").write_text(text)
    recipe = load_recipe(tmp_path / "mine.toml")
    assert (len(recipe.runs(1)), len(recipe.expected)) == (8, 4)
    assert elle("sweep", str(tmp_path / "mine.toml"), "--dry-run").code == 0


def test_the_table_of_metrics_names_each_of_them():
    table = "".join(re.findall(r"^\| `.*", PAGES["docs/metrics.md"], re.MULTILINE))
    assert all(f"`{name.removesuffix('_logits')}`" in table for name in METRICS)
    unlike = {
        name for name in METRICS if name.startswith("error") and f"{name.removesuffix('_logits')}_logits" not in METRICS
    }
    assert unlike == {"error_abs", "error_smooth"}


def named_before(words: str) -> set[str]:
    """The `code` of a sentence of the methods' page that ends in these words."""
    before, found, _ = " ".join(PAGES["docs/methods.md"].split()).partition(words)
    assert found, words
    return set(re.findall(r"`([^`]+)`", re.split(r"(?<=\w\.) ", before)[-1]))


def test_the_methods_whose_points_may_leave_the_pixel_range_are_named():
    rows = [row for row in METHODS.values() if row.penalty is None and isinstance(row.attack, SignStep)]
    leaving = {row.name for row in rows if not row.attack.clip}
    assert named_before("and the triplets of ELLE's penalty may leave [0, 1]") == leaving


def test_the_methods_that_are_for_linf_alone_are_named():
    refused = set()
    for name in METHODS:
        try:
            configured(name, norm="l2")
        except InputError:
            refused.add(name)
    assert named_before("are defined for l-infinity only") == refused

"""Every knob: what is accepted, what is refused and with which hint, and that a file gives back what was written."""

import os
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elle.config import Config, check_radius, format_radius, load_config, parse_config, parse_radius, parse_words
from elle.data.registry import DATASETS
from elle.errors import InputError

CONTRACT = {
    "method": "n-fgsm",
    "data": "cifar10",
    "root": "/some/where",
    "model": "small-cnn",
    "eps": "8/255",
    "norm": "l2",
    "weight": 12.5,
    "epochs": 3,
    "max_steps": 7,
    "batch": 32,
    "lr": 0.05,
    "schedule": "long",
    "seed": 4,
    "device": "cpu",
    "precision": "bf16",
    "compile": "off",
    "track": "clean,pgd-5",
    "eval_every": 2,
    "out": "runs/mine",
}
"""Each key of the contract with a value that is not its default."""


def from_toml(text):
    return parse_config(tomllib.loads(text))


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.mark.parametrize(("key", "value"), CONTRACT.items())
def test_a_key_means_the_same_in_a_word_and_in_a_file(key, value, write):
    in_word = load_config([f"{key}={value}"])
    in_file = load_config([], write(f"{key} = {value!r}\n"))
    assert in_word == in_file
    assert getattr(in_word, key) == (8 / 255 if key == "eps" else value)
    assert getattr(in_word, key) != getattr(Config(), key)


@pytest.mark.parametrize("key", Config.model_fields)
def test_every_key_has_a_description(key):
    assert Config.model_fields[key].description


@pytest.mark.parametrize(
    ("typo", "meant"), [("epoch", "epochs"), ("esp", "eps"), ("sede", "seed"), ("methods", "method")]
)
def test_an_unknown_key_names_the_nearest(typo, meant):
    with pytest.raises(InputError, match=rf"unknown key '{typo}', did you mean '{meant}'\?"):
        load_config([f"{typo}=3"])


def test_an_unknown_key_of_a_file_names_the_file(write):
    path = write("epoch = 3\n")
    with pytest.raises(InputError, match="settings.toml: unknown key 'epoch', did you mean 'epochs'"):
        load_config([], path)


@pytest.mark.parametrize(
    ("text", "eps"), [("8/255", 8 / 255), ("0.3", 0.3), ("1/10", 0.1), (" 4/255 ", 4 / 255), ("3e-2", 0.03)]
)
def test_a_radius_is_read_as_papers_write_it(text, eps):
    assert parse_radius(text) == eps
    assert load_config([f"eps={text}"]).eps == eps
    assert from_toml(f'eps = "{text}"').eps == eps


def test_a_radius_may_be_a_number_in_a_file():
    assert from_toml("eps = 0.3").eps == 0.3


@pytest.mark.parametrize("levels", [1, 2, 8, 16, 254])
def test_a_bare_number_of_grey_levels_is_refused_with_the_fraction(levels):
    with pytest.raises(InputError, match=f"did you mean eps={levels}/255"):
        load_config([f"eps={levels}"])
    with pytest.raises(InputError, match=f"did you mean eps={levels}/255"):
        from_toml(f"eps = {levels}")


@pytest.mark.parametrize("text", ["300/255", "1000/255", "300"])
def test_no_other_radius_is_guessed_from_a_fraction_or_from_more_than_all_grey_levels(text):
    with pytest.raises(InputError, match="it must be below 1, for example 8/255") as problem:
        load_config([f"eps={text}"])
    assert "did you mean" not in str(problem.value)


@pytest.mark.parametrize("text", ["0", "0/255", "-8/255", "-0.1"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_radius_of_zero_or_less_is_refused(text, norm):
    with pytest.raises(InputError, match="must be greater than 0"):
        load_config([f"eps={text}", f"norm={norm}"])


@pytest.mark.parametrize("text", ["eight", "8/0", "8/255/2", "nan", "inf", "0x8"])
def test_what_is_no_radius_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="write it as 8/255"):
        load_config([f"eps={text}"])


@pytest.mark.parametrize("value", ["true", "inf", "nan", "[0.1]"])
def test_a_file_gives_a_radius_or_an_error(value):
    with pytest.raises(InputError, match="eps"):
        from_toml(f"eps = {value}")


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" + "0" * 400])
def test_a_radius_too_large_for_a_float_is_refused(text):
    with pytest.raises(InputError):
        load_config([f"eps={text}"])


def test_an_l2_radius_may_exceed_one():
    assert load_config(["eps=1.5", "norm=l2"]).eps == 1.5
    assert check_radius(1.5, "l2") == 1.5


@given(st.integers(1, 254).filter(lambda levels: levels % 51))
def test_a_whole_number_of_grey_levels_is_written_as_a_fraction(levels):
    assert format_radius(levels / 255) == f"{levels}/255"


def test_a_short_decimal_is_written_as_such():
    assert [format_radius(eps) for eps in (51 / 255, 0.3, 0.28)] == ["0.2", "0.3", "0.28"]


@given(st.floats(1e-300, 1, exclude_max=True))
def test_a_written_radius_reads_back_exactly(eps):
    assert parse_radius(format_radius(eps)) == eps


@pytest.mark.parametrize("name", DATASETS)
def test_resolving_fills_every_open_key_from_the_dataset(name):
    config = load_config([f"data={name}", "method=fgsm"]).resolved()
    assert {key: getattr(config, key) for key in DATASETS[name].defaults} == DATASETS[name].defaults
    assert config.weight is None
    assert config.resolved() == config


@pytest.mark.parametrize(
    "word", ["eps=0.1", "epochs=3", "batch=10", "lr=0.01", "validation=0", "model=x:y", "crop=2", "flip=true"]
)
def test_resolving_keeps_what_was_given(word):
    given_config = load_config([word])
    key = word.partition("=")[0]
    assert getattr(given_config.resolved(), key) == getattr(given_config, key)


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
@pytest.mark.parametrize("base", ["", "fgsm+", "n-fgsm+"])
@pytest.mark.parametrize("penalty", ["elle", "elle-a"])
def test_the_default_weight_follows_dataset_and_penalty(name, base, penalty):
    config = load_config([f"data={name}", f"method={base}{penalty}"])
    assert config.resolved().weight == DATASETS[name].weights[penalty]


@pytest.mark.parametrize("weight", ["0", "7", "0.5"])
def test_a_given_weight_is_kept(weight):
    assert load_config(["method=elle-a", f"weight={weight}"]).resolved().weight == float(weight)


def test_an_unknown_dataset_names_the_nearest():
    with pytest.raises(InputError, match=r"no dataset 'digit', did you mean 'digits'\?"):
        load_config(["data=digit"]).resolved()


@pytest.mark.parametrize(
    "word",
    [
        "epochs=0",
        "epochs=2.5",
        "epochs=many",
        "max_steps=0",
        "batch=-1",
        "lr=0",
        "lr=-0.1",
        "lr=nan",
        "lr=inf",
        "weight=inf",
        "weight_decay=inf",
        "weight=-1",
        "momentum=1",
        "weight_decay=-1",
        "seed=-1",
        "seed=1.5",
        "eval_every=-1",
        "validation=-1",
        "crop=-1",
        "flip=yes",
        "norm=l1",
        "schedule=cosine",
        "precision=fp8",
        "compile=yes",
        "options=3",
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(word):
    with pytest.raises(InputError, match=word.partition("=")[0]) as problem:
        load_config([word])
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("seed", [2**64, 10**30])
def test_a_seed_that_torch_cannot_hold_is_refused(seed):
    with pytest.raises(InputError, match="seed"):
        load_config([f"seed={seed}"])


@pytest.mark.parametrize("word", ["fgsm", "=3", "--lr", ""])
def test_a_word_without_key_or_equals_is_refused_with_an_example(word):
    with pytest.raises(InputError, match="is not key=value, for example method=elle-a"):
        parse_words([word])


@pytest.mark.parametrize("word", ["out=", "lr=", "method.attack.noise="])
def test_a_key_without_a_value_is_refused(word):
    with pytest.raises(InputError, match=f"'{word}' has no value"):
        parse_words([word])


def test_lambda_is_written_in_one_way():
    """Written in another, a model card and `elle tune` would name a lambda that was not trained with."""
    with pytest.raises(InputError, match=r"^method\.weight\.value=5 is lambda, .*; write weight=5$"):
        load_config(["method=elle", "method.weight.value=5"])


@pytest.mark.parametrize("method", ["fgsm", "gradalign", "n-fgsm"])
def test_a_weight_for_a_method_without_the_penalty_is_refused(method):
    with pytest.raises(InputError, match=f"leave it out, or train with {method}\\+elle-a"):
        load_config([f"method={method}", "weight=3"]).resolved()


@pytest.mark.parametrize("word", ["data.root=3", "lr.x=1", "options.attack.noise=3"])
def test_only_the_method_has_parts(word):
    with pytest.raises(InputError, match="unknown key"):
        parse_words([word])


@pytest.mark.parametrize("key", ["root", "out", "model", "track", "final", "device", "data", "method"])
@pytest.mark.parametrize("text", ["5", "true", "1e3", "a=b", " x "])
def test_a_key_of_text_takes_any_text_as_it_is(key, text):
    assert getattr(load_config([f"{key}={text}"]), key) == text


def test_the_last_of_two_equal_words_counts():
    assert load_config(["lr=0.1", "lr=0.2"]).lr == 0.2


def test_words_override_a_file(write):
    config = load_config(["lr=0.2", "seed=5"], write('method = "fgsm"\nlr = 0.1\nepochs = 3\n'))
    assert (config.method, config.lr, config.epochs, config.seed) == ("fgsm", 0.2, 3, 5)


def test_phases_in_a_word_replace_the_epochs_and_the_batch_of_a_file(write):
    file = write('data = "cifar10"\nepochs = 20\nbatch = 256\nlr = 0.3')
    config = load_config(["phases=4:24:512,6:32:128"], file).resolved()
    assert (config.epochs, config.batch, config.lr) == (10, 512, 0.3)
    with pytest.raises(InputError, match="means epochs=10; leave epochs out"):
        load_config(["phases=4:24:512,6:32:128", "epochs=20"], file)


@pytest.mark.parametrize(
    ("word", "part", "value"),
    [
        ("method.attack.noise=3", "attack", {"noise": 3}),
        ("method.attack.alpha=1.25", "attack", {"alpha": 1.25}),
        ("method.attack.clip=true", "attack", {"clip": True}),
        ("method.attack.norm=l2", "attack", {"norm": "l2"}),
        ("method.weight.decay=0.9", "weight", {"decay": 0.9}),
    ],
)
def test_a_word_sets_a_field_of_the_method(word, part, value):
    config = load_config([word])
    assert config.options == {part: value}
    assert config.method == Config().method


@pytest.mark.parametrize(
    "words",
    [
        ["method=n-fgsm", "method.attack.noise=3", "method.attack.clip=true"],
        ["method.attack.noise=3", "method=n-fgsm", "method.attack.clip=true"],
        ["method.attack.clip=true", "method.attack.noise=3", "method=n-fgsm"],
        ["method.name=n-fgsm", "method.attack.clip=true", "method.attack.noise=3"],
    ],
)
def test_the_method_and_its_fields_come_in_any_order(words):
    config = load_config(words)
    assert config.method == "n-fgsm"
    assert config.options == {"attack": {"noise": 3, "clip": True}}


@pytest.mark.parametrize("text", ['method = "n-fgsm"\n', '[method]\nname = "n-fgsm"\n'])
def test_a_field_in_a_word_joins_the_method_of_a_file(text, write):
    config = load_config(["method.attack.noise=3"], write(text))
    assert (config.method, config.options) == ("n-fgsm", {"attack": {"noise": 3}})


def test_a_field_in_a_word_joins_the_other_parts_of_a_file(write):
    path = write('[method]\nname = "n-fgsm+elle-a"\n[method.weight]\ndecay = 0.9\n')
    config = load_config(["method.attack.noise=3"], path)
    assert config.options == {"weight": {"decay": 0.9}, "attack": {"noise": 3}}


def test_a_field_in_a_word_joins_the_other_fields_of_its_part_in_a_file(write):
    path = write('[method]\nname = "n-fgsm"\n[method.attack]\nnoise = 3\nalpha = 0.5\n')
    config = load_config(["method.attack.alpha=2.0", "method.attack.clip=true"], path)
    assert config.options == {"attack": {"noise": 3, "alpha": 2.0, "clip": True}}


@pytest.mark.parametrize(
    "text",
    [
        'method = "n-fgsm"\n"method.attack.noise" = 3\n"method.attack.clip" = true\n',
        '"method.attack" = { noise = 3, clip = true }\nmethod = "n-fgsm"\n',
        '"method.attack.noise" = 3\n[method]\nname = "n-fgsm"\nattack.clip = true\n',
    ],
)
def test_a_file_may_quote_the_fields_of_a_method_as_a_recipe_does(text, write):
    config = load_config([], write(text))
    assert (config.method, config.options) == ("n-fgsm", {"attack": {"noise": 3, "clip": True}})
    assert load_config(["method.attack.noise=4"], write(text)).options["attack"] == {"noise": 4, "clip": True}
    assert load_config(["method=fgsm"], write(text)).options == {}


def test_a_word_that_repeats_the_method_of_a_file_keeps_its_fields(write):
    path = write('[method]\nname = "n-fgsm"\n[method.attack]\nnoise = 3\n')
    assert load_config(["method=n-fgsm"], path) == load_config([], path)


@pytest.mark.parametrize("word", ["method.attack=3", "method.noise=3"])
def test_a_field_without_a_part_is_refused_with_an_example(word):
    with pytest.raises(InputError, match=r"for example method\.attack\.noise=3"):
        load_config([word])


@pytest.mark.parametrize(
    "content", [b"lr = ", b"lr 3", b"\xff\xfe", b"lr = 1\nlr = 2\n", b"[method\n", b'out = "\\q"'], ids=repr
)
def test_an_unreadable_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.toml is not a readable TOML file"):
        load_config([], path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="nowhere.toml does not exist"):
        load_config([], tmp_path / "nowhere.toml")


def test_a_folder_in_place_of_a_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="is not a readable TOML file"):
        load_config([], tmp_path)


fields = st.dictionaries(
    st.sampled_from(["alpha", "noise", "decay", "clip", "norm"]),
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
)
options = st.dictionaries(st.sampled_from(["attack", "weight", "regulariser"]), fields, max_size=3)


@given(root=st.text(), out=st.text())
@example(root='C:\\new "folder"', out="\x00\x1f\x7f\x85\n\r\t")
@example(root="données/图像/🙂", out="\u2028\ufeff\xa0")
@example(root="\U000e0001", out="\U0010ffff")
def test_any_text_survives_a_round_trip_through_toml(root, out):
    config = parse_config({"root": root, "out": out})
    assert from_toml(config.to_toml()) == config


@given(options)
def test_any_option_survives_a_round_trip_through_toml(values):
    config = parse_config({"method": "n-fgsm+elle-a", "options": values})
    assert from_toml(config.to_toml()) == config


@given(
    lr=st.floats(0, 1e300, exclude_min=True),
    weight=st.floats(0, 1e300),
    eps=st.floats(0, 1, exclude_min=True, exclude_max=True),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_number_survives_a_round_trip_through_toml(lr, weight, eps, seed):
    config = parse_config({"lr": lr, "weight": weight, "eps": eps, "seed": seed})
    assert from_toml(config.to_toml()) == config


@pytest.mark.parametrize("name", DATASETS)
def test_a_resolved_configuration_survives_a_round_trip_through_a_file(name, write):
    words = [f"data={name}", "method=n-fgsm+elle-a", "method.attack.noise=3", "norm=l2", "eps=0.5"]
    config = load_config(words).resolved()
    assert load_config([], write(config.to_toml())) == config


@pytest.mark.parametrize("word", ["eps=8/255", "flip=false", "lr=0.1", "epochs=3", "phases=2:8:4,1:16:2", "data=svhn"])
def test_a_setting_is_told_as_it_is_written(word):
    assert load_config([word]).spelled(word.partition("=")[0]) == word


def test_options_of_a_method_are_told_as_they_are_written():
    words = ["method.attack.noise=0.5", "method.attack.clip=true", "method.weight.history=5"]
    assert load_config(words).spelled("options") == " ".join(words)


def test_the_radius_of_one_norm_is_not_taken_for_another():
    with pytest.raises(InputError, match="norm=l2 needs eps, .*: 0.2, digits's own, is for linf"):
        load_config(["norm=l2"]).resolved()


def test_a_written_radius_stays_a_fraction():
    assert 'eps = "8/255"' in load_config(["eps=8/255"]).to_toml()


@pytest.mark.parametrize(
    "word",
    [
        *("seed=1", "eps=0.1", "norm=l2", "method=fgsm", "method.attack.noise=1", "weight=3", "clip=true"),
        *("data=svhn", "validation=5", "crop=1", "flip=true", "image_size=16", "loading=streaming", "cache=x"),
        *("model=x", "activation=silu", "normalise=dataset", "phases=1:16:8", "precision=bf16", "sync_bn=true"),
        *("lr=0.3", "epochs=3", "batch=8", "schedule=long", "momentum=0.5", "weight_decay=0.1", "decay_norm=false"),
        "average=0.9",
    ],
)
def test_configurations_that_train_different_models_differ(word):
    key = word.partition("=")[0]
    expected = "options" if "." in key else key
    assert load_config([]).differences(load_config([word])) == [expected]


@pytest.mark.parametrize("word", ["root=x", "out=x", "device=cpu", "compile=off", "eval_every=3", "track=clean"])
def test_configurations_that_train_the_same_model_do_not_differ(word):
    assert load_config([]).differences(load_config([word])) == []


def test_the_folder_of_decoded_images_may_be_another_on_another_machine():
    assert load_config(["cache=/scratch/a"]).differences(load_config(["cache=/scratch/b"])) == []


@pytest.mark.parametrize(
    ("words", "weight"),
    [
        (["method=elle"], 1_000),
        (["method=elle", "eps=10/255"], 5_000),
        (["method=elle", "eps=20/255"], 5_000),
        (["method=elle", "eps=22/255"], 10_000),
        (["method=elle", "eps=26/255"], 10_000),
        (["method=elle", "schedule=long"], 10_000),
        (["method=elle-a", "schedule=cos-1000"], 10_000),
        (["method=elle", "norm=l2", "eps=0.5"], 1_000),  # 0.5 is no l-infinity radius of the paper's
        (["method=elle-a", "eps=26/255"], 4_000),
        (["method=n-fgsm+elle-a", "schedule=long"], 4_000),
        (["method=elle", "eps=26/255", "weight=7"], 7),
        (["method=fgsm"], None),
    ],
)
def test_the_penalty_on_cifar10_weighs_what_the_paper_chose(words, weight):
    assert load_config(["data=cifar10", *words]).resolved().weight == weight


@pytest.mark.parametrize(
    ("words", "weight"),
    [
        ("data=cifar100 method=elle", 5_000),
        ("data=cifar100 method=elle-a", 4_000),
        ("data=cifar100 method=n-fgsm+elle-a", 4_000),
        ("data=svhn method=elle", 20_000),
        ("data=svhn method=elle-a", 20_000),
        ("data=svhn method=elle schedule=long-svhn", 20_000),
        ("data=svhn method=elle-a schedule=long-svhn", 20_000),
        ("data=svhn method=n-fgsm+elle-a", 5_000),
        ("data=svhn method=n-fgsm+elle-a schedule=long-svhn", 5_000),
        ("data=cifar10 method=elle-a schedule=long", 10_000),
        ("data=cifar10 method=n-fgsm+elle-a", 4_000),
        ("data=cifar10 method=gat+elle-a", 10_000),
        ("data=cifar10 method=gat+elle-a model=wide-resnet-28-10", 50_000),
        ("data=cifar10 method=advmixup-single+elle-a", 5_000),
        ("data=cifar10 method=trades-single+elle-a", 10_000),
        ("data=imagenet method=elle-a", 10_000),
        ("data=imagenet method=n-fgsm+elle-a eps=8/255", 20_000),
        ("data=imagenet method=n-fgsm+elle-a eps=16/255", 100_000),
    ],
)
def test_the_penalty_elsewhere_weighs_what_the_paper_chose(words, weight):
    assert load_config(words.split()).resolved().weight == weight


@pytest.mark.parametrize(("word", "wanted"), [("sync_bn=yes", "true or false"), ("devices=2.5", "a whole number")])
def test_what_a_value_should_be_is_said_in_plain_words(word, wanted):
    with pytest.raises(InputError, match=f"it should be {wanted}"):
        load_config([word])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["method=elle-a"], "none"),
        (["method=slat"], "dataset"),
        (["method=slat+elle-a"], "dataset"),
        (["method=slat", "normalise=none"], "none"),
        (["method=fgsm", "normalise=dataset"], "dataset"),
    ],
)
def test_images_are_normalised_where_a_method_is_meant_for_that(words, expected):
    resolved = load_config(["data=digits", *words]).resolved()
    assert resolved.normalise == resolved.resolved().normalise == expected


def test_the_optimizer_s_defaults_are_the_paper_s():
    config = load_config(["data=cifar10"]).resolved()
    assert (config.momentum, config.weight_decay, config.validation) == (0.9, 5e-4, 1024)
    assert (config.batch, config.lr, config.epochs, config.schedule) == (128, 0.2, 30, "short")


@pytest.mark.parametrize("key", ["out", "root"])
def test_a_name_that_no_file_of_settings_could_hold_is_refused(key):
    """As in a folder of a machine that wrote names in Latin-1; the run could not have been continued."""
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(InputError, match=rf"^{key}='caf.udce9' is not UTF-8"):
        load_config([f"{key}={name}"])
    with pytest.raises(InputError, match=rf"^{key}='caf.udce9' is not UTF-8"):
        Config().model_copy(update={key: name}).to_toml()

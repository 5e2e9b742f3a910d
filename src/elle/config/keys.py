"""Every knob of a run once: typed, validated, with its description and its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from elle.config.radius import Radius, check_radius, format_radius
from elle.core.schedules import SCHEDULES
from elle.data.phases import Phase, format_phases, parse_phases
from elle.data.registry import find_dataset
from elle.errors import InputError, nearest
from elle.published import normalisation, penalty_weight, table_radius

Value = TypeVar("Value")
OWN_IMAGES = ("arrays", "folder")
"""Datasets that are whatever their root holds: the name of that folder tells one from another, wherever it lies."""


def _phases(value: Any) -> tuple[Phase, ...] | None:
    return None if value is None else parse_phases(value)


class Config(BaseModel):
    """One training run. What is left out comes from the dataset's defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: str = Field("elle-a", description="a row of `elle methods`; any takes +elle or +elle-a")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="the method's own fields, written method.PART.FIELD=VALUE"
    )
    data: str = Field("digits", description="a row of `elle datasets`")
    root: str | None = Field(None, description="the data folder; default: $ELLE_DATA, then ./data")
    model: str | None = Field(
        None, description="a row of `elle models`, timm:NAME, torchvision:NAME, or your own module:function"
    )
    activation: Literal["relu", "silu", "softplus", "gelu"] = Field(
        "relu", description="relu, silu, softplus or gelu, for the rows of `elle models`"
    )
    normalise: Literal["none", "dataset"] = Field(
        "none",
        description="dataset: a first layer subtracts the training set's mean and divides by its std; slat's default",
    )
    init: str | None = Field(
        None,
        description="weights to start from: a run, a .safetensors file or a saved state_dict; default: random ones",
    )
    eps: Radius | None = Field(None, description="the radius of the attack, as a fraction: 8/255")
    norm: Literal["linf", "l2"] = Field("linf", description="the norm of eps: linf or l2")
    weight: float | None = Field(
        None, ge=0, description="the weight of ELLE's penalty: lambda, or lambda_max for ELLE-A"
    )
    epochs: int | None = Field(None, ge=1, description="passes over the training set")
    max_steps: int | None = Field(
        None, ge=1, description="stop after this many steps; the schedule still follows `epochs`"
    )
    phases: Annotated[tuple[Phase, ...] | None, BeforeValidator(_phases)] = Field(
        None, description="EPOCHS:IMAGE_SIZE:BATCH,... instead of epochs and batch: 6:128:512,6:224:224,3:288:128"
    )
    batch: int | None = Field(
        None, ge=1, description="images per step (at most the whole set); an incomplete last batch is dropped"
    )
    lr: float | None = Field(None, gt=0, description="the peak learning rate of the schedule")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(5e-4, ge=0, description="weight decay of SGD")
    decay_norm: bool = Field(True, description="apply weight decay to BatchNorm and biases too")
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="evaluate and save a running mean of the weights with this decay, such as 0.999; 0: off",
    )
    schedule: Literal["short", "short-svhn", "long", "long-svhn", "long-cos", "cos-1000", "imagenet-15"] | None = Field(
        None, description=f"of learning rate and eps: {', '.join(SCHEDULES)}"
    )
    clip: bool | None = Field(
        None, description="true: keep adversarial points and triplets in [0, 1]; false: as the method defines"
    )
    crop: int | None = Field(None, ge=0, description="padding in pixels for random crops; 0: none")
    flip: bool | None = Field(None, description="flip half of the images horizontally")
    image_size: int | None = Field(
        None, ge=8, description="side length of image files in pixels; default: 224, or less if all are smaller"
    )
    loading: Literal["auto", "resident", "streaming"] = Field(
        "auto",
        description="of image files: resident (kept on the device), streaming, or auto: streaming above 2 GiB",
    )
    workers: int | None = Field(
        None, ge=0, description="processes that decode image files; default: one per core, less one"
    )
    cache: str | None = Field(None, description="a folder for decoded images, so that streaming decodes each only once")
    validation: int | None = Field(
        None, ge=0, description="training images held out for tracking; 0: track on the test set"
    )
    track: str = Field(
        "clean,pgd-10", description="attacks, and metrics of `elle metrics`, to evaluate during training"
    )
    eval_every: int = Field(1, ge=0, description="epochs between these evaluations; 0: none")
    probe_every: int | None = Field(
        None,
        ge=0,
        description="steps between checks for a collapse; 0: none; default: two per epoch for attacks of 1 or 2 steps",
    )
    on_collapse: Literal["warn", "stop", "rollback"] = Field(
        "warn",
        description="warn, stop, or rollback (to the last healthy state, then with ELLE-A or twice its weight)",
    )
    final: str = Field("clean,fgsm,pgd-20", description="attacks to evaluate on the whole test set at the end")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the weights, the data order and all random draws")
    out: str | None = Field(None, description="the run directory; default: runs/ and a name made of the settings")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    devices: int = Field(1, ge=1, description="number of training processes, one GPU each; more than 1 starts torchrun")
    sync_bn: bool = Field(False, description="compute BatchNorm's statistics over all devices' images")
    accumulate: int = Field(1, ge=1, description="micro-batches per step on each device (gradient accumulation)")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = Field(
        "auto", description="fp32, tf32, fp16, bf16, or auto: fp16 on a GPU, fp32 on a CPU"
    )
    compile: Literal["auto", "off", "graph"] = Field(
        "auto", description="off, graph (each step is one CUDA graph), or auto: graph on a GPU"
    )
    memory: Literal["auto", "low"] = Field(
        "auto", description="low: ELLE in far less memory, computing part of its penalty twice"
    )
    fused: Literal["auto", "off"] = Field(
        "auto",
        description="off, or auto: custom GPU kernels for BatchNorm, ReLU and other small work (with Triton)",
    )

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Config:
        if self.eps is not None:
            check_radius(self.eps, self.norm)
        for key, value in _of_phases(self.phases).items():
            if key != "image_size" and getattr(self, key) not in (None, value):
                raise ValueError(f"{self.spelled('phases')} means {key}={value}; leave {key} out")
        if "value" in self.options.get("weight", {}):  # reports, cards and `elle tune` know lambda by its key
            value = self.options["weight"]["value"]
            raise ValueError(f"method.weight.value={value} is lambda, which has a key of its own; write weight={value}")
        _check_text(self.model_dump(include={*TEXT_KEYS}))
        return self

    def resolved(self) -> Config:
        """This configuration with every open value filled in from its schedule and its dataset's row."""
        dataset = find_dataset(self.data)
        defaults = dict(dataset.defaults)
        if self.norm != "linf" and self.eps is None:
            radius = format_radius(defaults["eps"])
            raise InputError(
                f"norm={self.norm} needs eps, for example eps=0.5: {radius}, {self.data}'s own, is for linf"
            )
        schedule: str = self.schedule or defaults["schedule"]
        if schedule != defaults["schedule"]:
            chosen = SCHEDULES[schedule]
            defaults |= {"epochs": chosen.epochs, "lr": chosen.lr, "batch": chosen.batch}
        defaults |= _of_phases(self.phases)
        if not dataset.files:  # evaluated at the size that its images have
            defaults.pop("image_size", None)
        open_keys = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        if "normalise" not in self.model_fields_set:
            open_keys["normalise"] = normalisation(self.method)
        penalty = self.method.rpartition("+")[2]
        if self.weight is not None and penalty not in dataset.weights:
            raise InputError(
                f"weight={self.weight:g} is lambda of ELLE's penalty, which method={self.method} does not have; "
                f"leave it out, or train with {self.method}+elle-a"
            )
        filled = parse_config(self.model_dump() | open_keys)
        if self.weight is None and penalty in dataset.weights:
            return filled.model_copy(update={"weight": filled.usual_weight(self.method)})
        return filled

    def usual_weight(self, method: str) -> float:
        """The default lambda, or lambda_max, of a method with a penalty on the data of this resolved configuration."""
        eps, dataset = table_radius(given(self.eps), self.norm), find_dataset(self.data)
        own = penalty_weight(method, self.data, eps, self.model or "")
        return own or dataset.weight(method.rpartition("+")[2], eps, given(self.schedule))

    def differences(self, other: Config) -> list[str]:
        """The keys on which two configurations train different models."""
        free = {"root", "out", "device", "compile", "eval_every", "track", "final", "max_steps"}
        free |= {"probe_every", "on_collapse", "workers", "memory", "fused", "devices", "accumulate"}
        if self.cache and other.cache:  # which folder it is; that there is one changes what is trained on
            free.add("cache")
        mine, theirs = self.model_dump(), other.model_dump()
        return [key for key in mine if key not in free and mine[key] != theirs[key]]

    def spelled(self, key: str) -> str:
        """`key=value` as a user would write it, for `options` the words of all; `no key` where it has no value."""
        value = getattr(self, key)
        if key == "options":
            own = {f"method.{part}.{name}": one for part, fields in value.items() for name, one in fields.items()}
            return " ".join(f"{name}={format_value(name, one)}" for name, one in own.items()) or "no method.PART.FIELD"
        return f"no {key}" if value is None else f"{key}={format_value(key, value)}"

    def name(self) -> str:
        """A name made of the settings that tell most runs apart, for a folder."""
        eps = format_radius(self.eps or 0).replace("/", "-")
        return f"{self.data}-{self.method}-eps{eps}-seed{self.seed}"

    def length(self) -> str:
        """How long it trains, in words."""
        if self.phases:
            return self.spelled("phases")
        return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'} of batch {self.batch}"

    def to_toml(self) -> str:
        """The configuration as a TOML file that `parse_config` reads back to an equal one."""
        values = self.model_dump(exclude_none=True)
        options = values.pop("options")
        if self.eps is not None:
            values["eps"] = format_radius(self.eps)
        if self.phases is not None:
            values["phases"] = format_phases(self.phases)
        _check_text(values)
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if key != "method" or not options]
        if options:
            lines += ["", "[method]", f"name = {_toml(self.method)}"]
        for part, fields in options.items():
            lines += ["", f"[method.{part}]", *(f"{key} = {_toml(value)}" for key, value in fields.items())]
        return "\n".join(lines) + "\n"


def _of_phases(phases: tuple[Phase, ...] | None) -> dict[str, int]:
    """The values of other keys that phases determine; a user may still choose another image size for the evaluation."""
    if not phases:
        return {}
    most = max(phase.batch for phase in phases)
    return {"epochs": sum(phase.epochs for phase in phases), "batch": most, "image_size": phases[-1].image_size}


KEYS = {name: field.description for name, field in Config.model_fields.items() if name != "options"}
"""What a user may set, with a description; a method's own fields are written method.PART.FIELD."""

TEXT_KEYS = {key for key, field in Config.model_fields.items() if "str" in str(field.annotation)} | {"eps", "phases"}
"""Keys whose word on the command line is text, whatever it looks like."""


def _check_text(values: Mapping[str, Any]) -> None:
    """Refuse the name of a folder whose bytes are no text: a config.toml with it could be read by nobody."""
    for key, value in values.items():
        if isinstance(value, str) and value.encode("utf-8", "replace").decode() != value:
            raise InputError(f"{key}={value!r} is not UTF-8, as config.toml is; rename it, or make a link to it")


def format_value(key: str, value: Any) -> str:
    """A setting's value as a user would write it; values that differ are never written alike."""
    if value is None:
        return "-"
    if key == "eps":
        return format_radius(value)
    if key == "phases":
        return format_phases(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text) + '"'


def given(value: Value | None) -> Value:
    """A value that `Config.resolved` has filled in."""
    assert value is not None
    return value


def parse_config(values: Mapping[str, Any], where: str = "") -> Config:
    """A Config from plain values, with one line for the first thing that is wrong."""
    values = dict(values)
    if isinstance(values.get("method"), Mapping):
        table = dict(values["method"])
        values["method"] = table.pop("name", Config().method)
        values["options"] = table
    try:
        return Config.model_validate(values)
    except ValidationError as problem:
        raise InputError(where + _first_problem(problem)) from None


def _first_problem(problem: ValidationError) -> str:
    error = problem.errors()[0]
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(key, KEYS)}; `elle train --help` lists the keys"
    if key.startswith("options"):
        part = key.removeprefix("options.")
        return f"method.{part}: write options as method.PART.FIELD=VALUE, for example method.attack.noise=3"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    message = message.replace("a valid boolean", "true or false").replace("a valid integer", "a whole number")
    return message if error["type"] == "value_error" and not key else f"{key}={error['input']!r}: {message}"


def on_own_images(config: Config, result: Mapping[str, Any], evaluation: Mapping[str, Any]) -> bool:
    """Whether an evaluation is on the test images of the run with this result, and not on a set shown to it later."""
    if evaluation.get("data", {}).get("name", config.data) != config.data:
        return False
    # A published set may come in another order (another layout), and former versions wrote no digest.
    digests = {one.get("test_points") for one in (result, evaluation)} - {None}
    return config.data not in OWN_IMAGES or len(digests) < 2

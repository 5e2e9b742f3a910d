"""What a run is made of: images, network and step, built from its configuration; the same on every rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elle.config import Config, given
from elle.core.attacks.network import in_eval_mode
from elle.core.precision import Precision
from elle.data.image_folder import filled_in, training_source
from elle.data.phases import Phase, Timetable
from elle.data.registry import dataset_statistics, load_dataset
from elle.data.resident import TrainingImages, to_tensors
from elle.data.sources import ImageSet, Split
from elle.data.workers import usable_workers
from elle.engine.batches import Batches
from elle.engine.batchnorm import synchronise
from elle.engine.initial import start_from_weights
from elle.engine.ranks import Ranks
from elle.engine.runtime import prepare_device
from elle.engine.same_images import check_alike
from elle.engine.step import Step
from elle.errors import InputError
from elle.evaluation.mode import are_probabilities
from elle.methods import Method, configured
from elle.models.layout import layout_of
from elle.models.registry import build_model, check_model


@dataclass(frozen=True)
class Parts:
    config: Config
    """With the values filled in that depend on the images."""
    method: Method
    images: ImageSet
    tracking_images: tuple[Tensor, Tensor]
    """The images on which accuracy is tracked, and their labels."""
    timetable: Timetable
    batches: Batches
    step: Step
    begun: str | None = None
    """What the network starts from, if not from random weights."""


def build_parts(
    config: Config, device: torch.device, precision: Precision, ranks: Ranks, initial: bool = True
) -> Parts:
    """The parts of a run, at its first step; what the configuration gets wrong is refused here.

    Not `initial`: the weights are going to be those of a checkpoint, and the file of `init` may be gone by now.
    """
    method = method_of(config)
    workers = _own_workers(config.workers, ranks)
    images = load_dataset(config.data, config.root, image_size=config.image_size, workers=workers)
    check_alike(images, ranks)
    config = config.model_copy(update=filled_in(images, config.model_dump()))
    prepare_device(device, precision)
    torch.manual_seed(config.seed)
    data, validation = _source(config, images, device, workers, ranks)
    shape = images.test.x.shape
    phases = config.phases or (Phase(given(config.epochs), shape[-1], given(config.batch)),)
    timetable = Timetable(phases, len(data))
    if config.phases and method.replays > 1:
        raise InputError(f"phases: {method.name} keeps its batch for several steps; it trains in one phase")
    batches = Batches(data, timetable, ranks, accumulate=config.accumulate, seed=config.seed, replays=method.replays)
    network, begun = _network(config, images, method, device, ranks, initial)
    for phase in phases:
        if ranks.share(min(phase.batch, len(data)), config.accumulate) == config.accumulate:
            size = (phase.image_size, phase.image_size) if config.phases else shape[2:]
            _check_single_image(network, given(config.model), (shape[1], *size), device)
    step = Step(
        network,
        method,
        data,
        eps=given(config.eps),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        decay_norm=config.decay_norm,
        precision=precision,
        steps_per_epoch=timetable.longest_epoch,
        total_steps=timetable.total_steps,
        memory=config.memory,
        fused=config.fused,
        average=config.average,
        ranks=ranks,
        accumulate=config.accumulate,
    )
    step.prepare(batches.share, shape[1:])
    tracking_images = to_tensors(validation if len(validation) else images.test, device)
    return Parts(config, method, images, tracking_images, timetable, batches, step, begun)


def method_of(config: Config) -> Method:
    """The method that a resolved configuration asks for."""
    return configured(
        config.method,
        weight=config.weight,
        norm=config.norm,
        clip=given(config.clip),
        data=config.data,
        eps=given(config.eps),
        model=config.model or "",  # a folder's is not known yet
        options=config.options,
    )


def _own_workers(wanted: int | None, ranks: Ranks) -> int | None:
    """How many processes decode images for this rank: the ranks of a machine share its cores."""
    if wanted is not None or ranks.count == 1:
        return wanted
    return max(1, usable_workers(None) // ranks.on_this_machine)


def _source(
    config: Config, images: ImageSet, device: torch.device, workers: int | None, ranks: Ranks
) -> tuple[TrainingImages, Split]:
    """The training images, and those held out."""
    return training_source(
        images.train,
        device,
        validation=given(config.validation),
        seed=config.seed,
        batch=given(config.batch),
        epochs=given(config.epochs),
        phases=config.phases,
        crop=given(config.crop),
        flip=given(config.flip),
        loading=config.loading,
        workers=workers,
        cache=config.cache,
        rank=ranks.rank,
        ranks=ranks.count,
    )


def _network(
    config: Config, images: ImageSet, method: Method, device: torch.device, ranks: Ranks, initial: bool
) -> tuple[nn.Module, str | None]:
    """The network to train, with the same weights on every rank, and what it starts from."""
    name, (channels, height, width) = given(config.model), images.test.x.shape[1:]
    normalise = dataset_statistics(config.data, images.train) if config.normalise == "dataset" else None
    model = build_model(
        name, (channels, height, width), len(images.classes), activation=config.activation, normalise=normalise
    )
    for size in {phase.image_size for phase in config.phases or ()}:
        check_model(model, name, (channels, size, size), len(images.classes))
    if ":" in name:
        _check_trainable(model, name, (channels, height, width))
    method.check(model, (channels, height, width))
    begun = None
    if config.init is not None and initial:
        begun = ranks.from_first(lambda: start_from_weights(model, config, len(images.classes)))
    model = model.to(device, memory_format=layout_of(model))  # type: ignore[call-overload]
    # The same by their seed; but a network of the user's may draw elsewhere, and the first alone has read `init`.
    ranks.copy_from_first([*model.parameters(), *model.buffers()])
    return (synchronise(model, ranks) if config.sync_bn and ranks.count > 1 else model).train(), begun


def _check_trainable(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a user's network without trainable parameters or a gradient of its images, or with a last softmax."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"model={name} has no parameters to train: none, or requires_grad is false for all of them")
    x = torch.zeros(2, *shape, requires_grad=True)
    with in_eval_mode(model):
        logits = model(x)
        gradient = torch.autograd.grad(logits.sum(), x, allow_unused=True)[0] if logits.requires_grad else None
    if gradient is None:
        raise InputError(
            f"model={name} gives its images no gradient, without which no attack goes up; "
            f"leave out what cuts it off (detach, no_grad, a comparison)"
        )
    if are_probabilities(logits).all():  # it would train, and hardly learn
        raise InputError(
            f"model={name} gives probabilities, not logits, and the loss takes their softmax itself; "
            f"leave out the network's last softmax"
        )


def _check_single_image(model: nn.Module, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse to train a network on images one by one where its BatchNorm has only one value to measure then."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            copy.deepcopy(model)(torch.zeros(1, *shape, device=device))
    except ValueError:
        raise InputError(
            f"a step of model={name} takes one image at a time, whose variance its BatchNorm cannot tell; "
            f"use a larger batch or a smaller accumulate, or give more images"
        ) from None

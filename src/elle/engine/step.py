"""One optimisation step as a function of tensors: no host synchronisation, so a CUDA graph can capture it."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from elle.core.attacks import Replay
from elle.core.attacks.network import begun
from elle.core.controller import OnOff
from elle.core.precision import Precision, autocast
from elle.core.second_order import twice_differentiable
from elle.core.subspace import flattened
from elle.data.resident import TrainingImages
from elle.engine import apart
from elle.engine.alongside import Alongside
from elle.engine.averaging import Average
from elle.engine.batchnorm import running_statistics
from elle.engine.draws import Draws
from elle.engine.fused import by_kernels
from elle.engine.loss_scale import LossScale
from elle.engine.ranks import ALONE, Ranks
from elle.engine.sgd import SGD
from elle.engine.slopes import Slopes
from elle.errors import InputError
from elle.methods import Method
from elle.models.batch_norm import launchable, use_fused
from elle.models.half_weights import half_weights, has_compiled_parts, lowered_weights
from elle.models.recomputing import blocks_to_recompute, recomputed

RECORDED = ("loss", "accuracy", "error", "weight", "threshold")
"""What each step writes down: the loss and accuracy at its own adversarial points, and the penalty's state."""

Penalty = Literal["trained", "measured", "left out"]
"""What a step makes of its penalty: its gradient, its error only (without a backward), or nothing."""

_OF_IMAGES = ("x", "delta")
"""What is kept for each image of a batch, of which a rank has its own."""


class Step:
    """Draw the batch, attack it, weigh the penalty, update the parameters, write down what happened."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        data: TrainingImages,
        *,
        eps: float,
        momentum: float,
        weight_decay: float,
        decay_norm: bool = True,
        precision: Precision,
        steps_per_epoch: int,
        total_steps: int,
        memory: Literal["auto", "low"] = "auto",
        fused: Literal["auto", "off"] = "auto",
        average: float = 0.0,
        ranks: Ranks = ALONE,
        accumulate: int = 1,
    ) -> None:
        self.fused = fused == "auto"
        use_fused(model, self.fused)
        self.memory, self.model, self.data, self.precision = memory, model, data, precision
        self.ranks, self.accumulate = ranks, accumulate
        self.average = Average(model, average) if average else None
        self.total_steps = total_steps
        device = self.device = next(model.parameters()).device
        self.alongside = Alongside(device)
        self.lr = torch.zeros((), device=device)
        # In double, as a number of Python's is: a float32 one would round twice, and other points would be attacked.
        self.eps = torch.tensor(eps, dtype=torch.float64, device=device)
        decayed = [one for one in model.parameters() if decay_norm or one.dim() > 1]
        spared = [one for one in model.parameters() if not decay_norm and one.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
        self.optimizer = SGD(groups, self.lr, momentum)
        self.scale = LossScale(device) if precision == "fp16" else None
        self.use(method)
        self.records = torch.full((steps_per_epoch, len(RECORDED)), torch.nan, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros((), dtype=torch.int64, device=device)
        self.nothing = torch.full((), torch.nan, device=device)
        """Written down of a penalty that a step does not have."""
        self.kept: dict[str, Tensor] = {}
        """What the method itself carries from step to step: a replayed batch, a basis of weights."""
        if method.subspace is not None:
            self.kept |= method.subspace.start(model)
            method.subspace.observe(self.kept, model, 0, total_steps)

    def prepare(self, batch: int, shape: tuple[int, ...]) -> None:
        """Room for what is kept of a batch, before the first step."""
        if isinstance(self.method.attack, Replay):
            self.kept |= {name: torch.zeros(batch, *shape, device=self.device) for name in _OF_IMAGES}

    def use(self, method: Method) -> None:
        """Train with this method from now on; the rule of its weight starts afresh."""
        self.method = method
        self.rule = method.weight.start(self.device) if method.weight is not None else {}
        self.compiled = has_compiled_parts(self.model)
        blocks = self._blocks_to_recompute()
        self.blocks = blocks if method.regulariser is not None else []
        self.apart = apart.Apart(self.model) if self._may_run_apart() else None
        self.optimizer.expect_half(lowered_weights(self.model) if self._may_update_by_half() else [])

    def begin_phase(self) -> None:
        """Restart what belongs to one phase of the run: the ramp of the weight."""
        if isinstance(self.method.weight, OnOff):
            self.method.weight.begin_phase(self.rule)

    def __call__(self, index: Tensor, penalty: Penalty = "trained") -> None:
        """Train on the images at `index` [B], this rank's part of the batch."""
        draws = Draws(self.ranks.rank, self.ranks.count, self.accumulate)
        with draws.whole(len(index)):
            x, y = self.data.batch(index)
        x = self._replayed(x)
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad()
        row = (self._gradient if self.accumulate == 1 else self._accumulated)(x, y, draws, penalty)
        # The one message of the step: gradients, BatchNorm's running statistics and what is written down.
        if self.ranks.count > 1:
            self.alongside.join()
        self.ranks.average_gradients(self._trained_parameters(), [*running_statistics(self.model), row])
        with self.alongside.work(row):
            self.records.index_copy_(0, self.position, row.unsqueeze(0))
            torch._foreach_add_([self.position, self.done], 1)
        self._update()
        self.alongside.join()
        if self.average is not None:
            self.average.update(self.done - 1)

    def _gradient(self, x: Tensor, y: Tensor, draws: Draws, penalty: Penalty) -> Tensor:
        """Leave the gradient of the loss and the weighted penalty in the parameters; what is to be written down."""
        # Without a penalty there is one chain of passes, and its weight gradients may be computed beside it.
        apart = None if penalty == "left out" else self.apart
        with self._weights(chains=1 if apart is None else 2) as second:
            with draws.part(0, len(y), self._fewest(len(y))), self._passes():
                if apart is not None:
                    apart.begin()
                loss, logits, x_adv = self._loss(x, y, self.kept.get("delta"))
                terms = [loss]
                if self.blocks or penalty != "trained":
                    # Now, so that what the loss has kept is given back before the penalty needs room.
                    self._backward(terms.pop())
                with second():
                    error = self._error(x, y, x_adv, logits, penalty)
                seen, weight, threshold = self._weigh(error, penalty)
                if error is not None and penalty == "trained":
                    terms.append(weight * error)
            if terms:
                self._backward(functools.reduce(operator.add, terms))
        self._move(self.kept.get("delta"), x_adv.grad)
        with self.alongside.work(loss, logits, y, seen, weight, threshold):
            return _row(loss, _accuracy(logits, y), seen, weight, threshold)

    def _accumulated(self, x: Tensor, y: Tensor, draws: Draws, penalty: Penalty) -> Tensor:
        """As `_gradient`, a micro-batch at a time.

        The gradients of loss and penalty are added up apart: the weight is known only after the last micro-batch.
        """
        count = self.accumulate
        # In half precision the penalty's gradient needs a scale: the largest weight it may get.
        scale = (self.method.weight.value if self.method.weight is not None else 0) or 1.0
        read_again = self.method.regulariser is not None and self.method.regulariser.form == "2p"
        slopes = Slopes(self._trained_parameters())
        deltas = self.kept["delta"].chunk(count) if "delta" in self.kept else [None] * count
        recorded: list[tuple[Tensor, Tensor]] = []
        errors: list[Tensor] = []
        for number, (x_part, y_part, delta) in enumerate(zip(x.chunk(count), y.chunk(count), deltas, strict=True)):
            with self._weights():
                with draws.part(number, len(y_part), self._fewest(len(y_part))), self._passes():
                    loss, logits, x_adv = self._loss(x_part, y_part, delta)
                    self._backward(loss / count, keep=read_again)
                    error = self._error(x_part, y_part, x_adv, logits, penalty)
                if error is not None:
                    errors.append(error.detach())
                if error is not None and penalty == "trained":
                    slopes.add(scale * error / count, self._loss_scale())
            self._move(delta, x_adv.grad)
            recorded.append((loss.detach(), _accuracy(logits, y_part)))
        seen, weight, threshold = self._weigh(torch.stack(errors).mean() if errors else None, penalty)
        if errors and penalty == "trained":
            slopes.add_to_gradients(weight / scale)
        loss, accuracy = (torch.stack([one[k] for one in recorded]).mean() for k in range(2))
        return _row(loss, accuracy, seen, weight, threshold)

    def _trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _loss(self, x: Tensor, y: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Attack, then the forwards of the loss: the loss, the logits, and the points trained on."""
        method, model = by_kernels(self.method) if self._may_fuse() else self.method, self.model
        if isinstance(method.attack, Replay):
            assert delta is not None
            x_adv, objective = method.attack.points(x, delta), method.loss
        else:
            x_adv, objective = method.attacked(model, x, y, self.eps)
        loss, logits = objective(model, x, y, x_adv, self.eps, (self.done, self.done / self.total_steps))
        return loss, logits, x_adv

    def _error(self, x: Tensor, y: Tensor, x_adv: Tensor, logits: Tensor, penalty: Penalty) -> Tensor | None:
        """The penalty's mean error, with a graph where it is trained; None where the step has no penalty."""
        method = self.method
        if method.regulariser is None or method.weight is None or penalty == "left out":
            return None
        passes = contextlib.nullcontext() if self.apart is None else self.apart.passes()
        again = recomputed(self.model, self.blocks)
        with torch.set_grad_enabled(penalty == "trained"), again, passes:
            return method.regulariser(self.model, x, y, self.eps, adversarial=(x_adv, logits)).mean()

    def _fewest(self, images: int) -> int:
        """For how few of a micro-batch's images the method draws."""
        return images if self.method.regulariser is None else self.method.regulariser.measured(images)

    def _blocks_to_recompute(self) -> list[nn.Module]:
        """With memory=low, those of the penalty's passes."""
        if self.memory != "low":
            return []
        if self.method.regulariser is not None and self.method.regulariser.form == "2p":
            raise InputError("memory=low is not for method.regulariser.form=2p, which keeps the attack's own forward")
        return blocks_to_recompute(self.model)

    def _may_run_apart(self) -> bool:
        """Whether the penalty's passes may run beside those of the loss, which they then must not need."""
        method = self.method
        return (
            self.device.type == "cuda"
            and method.regulariser is not None
            and method.regulariser.form != "2p"
            and self._lowers()
            and not self.blocks
            and self.accumulate == 1
            and apart.suits(self.model)
        )

    def _may_fuse(self) -> bool:
        """Whether kernels of our own may be launched, of which there are first derivatives alone."""
        once = self.fused and not self.method.double_backpropagation
        return once and self.device.type == "cuda" and launchable(self.device)

    def _lowers(self) -> bool:
        """Whether a step makes half-precision copies of all weights at once.

        Not in steps that differentiate twice, where each pass makes its own, so that their gradients are added up in
        float32; nor of a network that its user has compiled.
        """
        return self.precision == "fp16" and not self.compiled and not self.method.double_backpropagation

    def _may_update_by_half(self) -> bool:
        """Whether the gradients may stay in float16 until the update: nothing is to be added to them before."""
        alone = self.ranks.count == 1 and self.accumulate == 1
        return self._lowers() and alone and self._may_fuse()

    def _weights(
        self, chains: int = 1
    ) -> contextlib.AbstractContextManager[Callable[[], contextlib.AbstractContextManager[None]]]:
        """Around all passes through the network and the backward: the weights that they see.

        The passes of a second chain are to be within what this yields.
        """
        if self._lowers():
            return half_weights(self.model, chains, self.fused, beside=not self.blocks)
        return contextlib.nullcontext(contextlib.nullcontext)

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """Around all passes through the network: their precision, and what a gradient of a gradient needs."""
        twice = twice_differentiable() if self.method.double_backpropagation else contextlib.nullcontext()
        with autocast(self.device, self.precision), twice:
            yield

    def _backward(self, total: Tensor, keep: bool = False) -> None:
        with torch.autocast(self.device.type, enabled=False):
            begun(total, self._loss_scale()).backward(retain_graph=keep)  # type: ignore[no-untyped-call]

    def _loss_scale(self) -> Tensor | None:
        """Where a backward begins, instead of 1: the gradients of the loss times this, without that product."""
        return None if self.scale is None else self.scale.value

    def _weigh(self, error: Tensor | None, penalty: Penalty) -> tuple[Tensor, Tensor, Tensor]:
        """Have the rule see this step's error; what it saw, the weight that acts on the step, and the threshold.

        What it sees is the error of all ranks' images, the same bits on each, and so is the weight: what is chosen by
        it (`LeavingOut`) is chosen alike on every rank.
        """
        rule = self.method.weight
        if error is None or rule is None:
            return self.nothing, self.nothing, self.nothing
        seen = self.ranks.mean(error.detach())
        after = rule.update(self.rule, seen)
        # A copy: the rule's state is overwritten in place below, before the backward that reads the weight.
        weight, threshold = rule.acting(self.rule, after).clone(), after["threshold"]
        for name, value in after.items():
            self.rule[name].copy_(value)
        return seen, weight if penalty == "trained" else torch.zeros_like(weight), threshold

    def _move(self, delta: Tensor | None, gradient: Tensor | None) -> None:
        """Move a replayed perturbation, in place."""
        if isinstance(self.method.attack, Replay) and delta is not None and gradient is not None:
            delta.copy_(self.method.attack.moved(delta, gradient, self.eps))

    def _replayed(self, x: Tensor) -> Tensor:
        """The new batch where a round of replays begins, otherwise the one that was drawn then."""
        if self.method.replays == 1:
            return x
        self.kept["x"].copy_(torch.where(self.done % self.method.replays == 0, x, self.kept["x"]))
        return self.kept["x"]

    def _update(self) -> None:
        parameters = list(self.model.parameters())
        before = flattened(parameters) if self.method.subspace is not None else None
        self.optimizer.step(self.scale)
        if self.scale is not None:
            self.scale.update()
        if self.method.subspace is not None and before is not None:
            self.method.subspace.project(self.kept, parameters, before)

    def between(self, done: int) -> None:
        """The work of the method between two steps, after `done` of them."""
        if self.method.subspace is not None and self.method.subspace.observe(
            self.kept, self.model, done, self.total_steps
        ):
            for state in self.optimizer.state.values():
                for buffer in state.values():
                    buffer.zero_()  # momentum of the way back

    def trained(self) -> contextlib.AbstractContextManager[None]:
        """Within it the network is the one that training yields: the mean of its weights, where one is kept."""
        return contextlib.nullcontext() if self.average is None else self.average.shown()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on, whatever the number of ranks; all of them ask together."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, parameter in enumerate(self.model.parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{number}.{name}"] = value
        tensors |= {f"rule.{name}": value for name, value in self.rule.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.tensors.items()}
        for name, value in self.kept.items():
            tensors[f"kept.{name}"] = self.ranks.gathered(value) if name in _OF_IMAGES else value
        tensors |= {"records": self.records, "position": self.position, "done": self.done}
        if self.scale is not None:
            tensors["scale"] = self.scale.value
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` returned; raises KeyError or RuntimeError where it does not fit."""
        for name, value in self.state().items():
            if name.startswith("random."):
                continue
            saved = tensors[name]
            if saved.shape != value.shape or saved.dtype != value.dtype:
                raise RuntimeError(
                    f"{name} is {tuple(saved.shape)} {saved.dtype}, expected {tuple(value.shape)} {value.dtype}"
                )
            with torch.no_grad():
                if name.removeprefix("kept.") in _OF_IMAGES:
                    self.kept[name.removeprefix("kept.")].copy_(self.ranks.own(saved))
                else:
                    value.copy_(saved)
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)


def _accuracy(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.detach().argmax(1) == y).float().mean()


def _row(*recorded: Tensor) -> Tensor:
    """The values of `RECORDED` in one tensor."""
    return torch.stack([value.detach().float() for value in recorded])

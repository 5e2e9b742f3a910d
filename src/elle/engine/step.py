"""One optimisation step as a function of tensors: no host synchronisation, so a CUDA graph can capture it."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Literal

import torch
from torch import Tensor, nn

from elle.core.attacks import Replay
from elle.core.controller import Constant, OnOff
from elle.core.second_order import twice_differentiable
from elle.core.subspace import flattened
from elle.data.resident import Resident
from elle.data.streaming import Streaming
from elle.engine.recomputing import blocks_to_recompute, recomputed
from elle.engine.runtime import Precision, autocast
from elle.methods import Method
from elle.models.batch_norm import use_fused

RECORDED = ("loss", "accuracy", "error", "weight", "threshold")
"""What each step writes down: the loss and accuracy at its own adversarial points, and the penalty's state."""

Penalty = Literal["trained", "measured", "left out"]
"""What a step makes of its penalty: its gradient, its error only (without a backward), or nothing."""

# fp16 gradients need scaling; 1024 sufficed in every run measured, and the scaler halves it should one overflow.
_LOSS_SCALE = 1024.0


class Step:
    """Draw the batch, attack it, weigh the penalty, update the parameters, write down what happened."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        data: Resident | Streaming,
        *,
        eps: float,
        momentum: float,
        weight_decay: float,
        decay_norm: bool = True,
        precision: Precision,
        steps_per_epoch: int,
        total_steps: int,
        memory: Literal["auto", "low"] = "auto",
        fused: Literal["auto", "off"] = "off",
    ) -> None:
        use_fused(model, fused == "auto")
        self.memory, self.model, self.data, self.precision = memory, model, data, precision
        self.total_steps = total_steps
        device = self.device = next(model.parameters()).device
        self.lr = torch.zeros((), device=device)
        # In double, as a number of Python's is: a float32 one would round twice, and other points would be attacked.
        self.eps = torch.tensor(eps, dtype=torch.float64, device=device)
        decayed = [one for one in model.parameters() if decay_norm or one.dim() > 1]
        spared = [one for one in model.parameters() if not decay_norm and one.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(
            [group for group in groups if group["params"]], lr=self.lr, momentum=momentum, fused=True
        )
        if momentum:
            for parameter in model.parameters():
                # From the start, so that a first step skipped for an overflow leaves no uninitialised buffer.
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=_LOSS_SCALE, growth_interval=2**31 - 1, enabled=precision == "fp16"
        )
        self.use(method)
        self.records = torch.full((steps_per_epoch, len(RECORDED)), torch.nan, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros((), dtype=torch.int64, device=device)
        self.kept: dict[str, Tensor] = {}
        """What the method itself carries from step to step: a replayed batch, a basis of weights."""
        if method.subspace is not None:
            self.kept |= method.subspace.start(model)
            method.subspace.observe(self.kept, model, 0, total_steps)

    def prepare(self, batch: int, shape: tuple[int, ...]) -> None:
        """Room for what is kept of a batch, before the first step."""
        if isinstance(self.method.attack, Replay):
            self.kept |= {name: torch.zeros(batch, *shape, device=self.device) for name in ("x", "delta")}

    def use(self, method: Method) -> None:
        """Train with this method from now on; the rule of its weight starts afresh."""
        self.method = method
        self.rule = method.weight.start(self.device) if method.weight is not None else {}
        self.blocks = blocks_to_recompute(self.model, method) if self.memory == "low" else []

    def begin_phase(self) -> None:
        """What starts anew with a phase of the run."""
        if isinstance(self.method.weight, OnOff):
            self.method.weight.begin_phase(self.rule)

    def __call__(self, index: Tensor, penalty: Penalty = "trained") -> None:
        """Train on the images at `index` [B]."""
        method, model = self.method, self.model
        x, y = self.data.batch(index)
        x = self._replayed(x)
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        when = (self.done, self.done / self.total_steps)
        error = weight = threshold = x.new_full((), torch.nan)
        second_order = twice_differentiable() if method.double_backpropagation else contextlib.nullcontext()
        # One autocast around all passes: the half-precision copies of the weights are made once a step.
        with autocast(self.device, self.precision), second_order:
            if isinstance(method.attack, Replay):
                x_adv = method.attack.points(x, self.kept["delta"])
            else:
                x_adv = x if method.attack is None else method.attack(model, x, y, self.eps)
            loss, logits = method.loss(model, x, y, x_adv, self.eps, when)
            terms = [loss]
            if self.blocks or penalty != "trained":
                # Now, so that what the loss has kept is given back before the penalty needs room.
                self._backward(terms.pop())
            if method.regulariser is not None and method.weight is not None and penalty != "left out":
                with torch.set_grad_enabled(penalty == "trained"), recomputed(self.blocks):
                    error = method.regulariser(model, x, y, self.eps, adversarial=(x_adv, logits)).mean()
                weight, threshold = self._weigh(method.weight, error.detach())
                if penalty == "trained":
                    terms.append(weight * error)
                else:
                    weight = torch.zeros_like(weight)
        if terms:
            self._backward(functools.reduce(operator.add, terms))
        self._update()
        if isinstance(method.attack, Replay) and x_adv.grad is not None:
            self.kept["delta"].copy_(method.attack.moved(self.kept["delta"], x_adv.grad, self.eps))
        accuracy = (logits.detach().argmax(1) == y).float().mean()
        row = torch.stack([value.detach().float() for value in (loss, accuracy, error, weight, threshold)])
        self.records.index_copy_(0, self.position, row.unsqueeze(0))
        self.position.add_(1)
        self.done.add_(1)

    def _backward(self, total: Tensor) -> None:
        with torch.autocast(self.device.type, enabled=False):
            self.scaler.scale(total).backward()  # type: ignore[no-untyped-call]

    def _weigh(self, rule: Constant | OnOff, error: Tensor) -> tuple[Tensor, Tensor]:
        """Have the rule see this step's error; the weight that acts on the step, and the threshold."""
        after = rule.update(self.rule, error)
        # A copy: the rule's state is overwritten in place below, before the backward that reads the weight.
        weight, threshold = rule.acting(self.rule, after).clone(), after["threshold"]
        for name, value in after.items():
            self.rule[name].copy_(value)
        return weight, threshold

    def _replayed(self, x: Tensor) -> Tensor:
        """The new batch where a round of replays begins, otherwise the one that was drawn then."""
        if self.method.replays == 1:
            return x
        self.kept["x"].copy_(torch.where(self.done % self.method.replays == 0, x, self.kept["x"]))
        return self.kept["x"]

    def _update(self) -> None:
        parameters = list(self.model.parameters())
        before = flattened(parameters) if self.method.subspace is not None else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.method.subspace is not None and before is not None:
            self.method.subspace.project(self.kept, parameters, before)

    def between(self, done: int) -> None:
        """What the method does after `done` steps and outside of them."""
        if self.method.subspace is not None and self.method.subspace.observe(
            self.kept, self.model, done, self.total_steps
        ):
            for state in self.optimizer.state.values():
                for buffer in state.values():
                    buffer.zero_()  # momentum of the way back

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, parameter in enumerate(self.model.parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{number}.{name}"] = value
        tensors |= {f"rule.{name}": value for name, value in self.rule.items()}
        tensors |= {f"kept.{name}": value for name, value in self.kept.items()}
        tensors |= {"records": self.records, "position": self.position, "done": self.done}
        if self.scaler.is_enabled():
            tensors["scale"] = torch.tensor(self.scaler.get_scale())
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` returned; raises KeyError or RuntimeError where it does not fit."""
        for name, value in self.state().items():
            if name.startswith(("random.", "scale")):
                continue
            saved = tensors[name]
            if saved.shape != value.shape or saved.dtype != value.dtype:
                raise RuntimeError(
                    f"{name} is {tuple(saved.shape)} {saved.dtype}, expected {tuple(value.shape)} {value.dtype}"
                )
            with torch.no_grad():
                value.copy_(saved)
        if self.scaler.is_enabled():
            kept = self.scaler.state_dict()
            self.scaler.load_state_dict(kept | {"scale": float(tensors["scale"])})
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)

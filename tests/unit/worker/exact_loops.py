"""Training loops by name. Each is run undisturbed, and killed twice; every bit has to be equal.

A loop is a generator. It registers its objects by `life.register`, and yields the loss of each
step. It begins at `life.start`, as a script does under `run.steps`.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.unit.worker.exact_life import STEPS, Life
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

Loop = Callable[[Life], Iterator[Tensor]]
LOOPS: dict[str, Loop] = {}


def loop(body: Loop) -> Loop:
    LOOPS[body.__name__] = body
    return body


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape)


def make_mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), *(middle or (nn.Tanh(),)), nn.Linear(24, 4))


def train(
    life: Life,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after: Callable[[int, Tensor], object] = lambda step, loss: None,
    batch: Callable[[], Tensor] = lambda: draw(32, 16),
    until: int = STEPS,
) -> Iterator[Tensor]:
    """Yield the losses of a plain loop; call `after` at each step's end."""
    for step in life.steps(until):
        x = batch()
        loss = (
            (model(x).float() - x.float().flatten(1).mean(1, keepdim=True).tanh()).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step, loss)
        yield loss


# --- every optimizer of torch -------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_maximize": lambda p: torch.optim.AdamW(p, lr=0.001, maximize=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}  # fmt: skip


def of_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model = make_mlp()
        optimizer = make(model.parameters())
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer)

    return body


LOOPS |= {f"optimizer_{name}": of_optimizer(make) for name, make in OPTIMIZERS.items()}


@loop
def optimizer_lbfgs(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5,
                                  line_search_fn="strong_wolfe")  # fmt: skip
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = draw(32, 16)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        yield optimizer.step(closure)


@loop
def optimizer_muon(life: Life) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 4, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


@loop
def optimizer_sparse_adam(life: Life) -> Iterator[Tensor]:
    table = nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    life.register(model=table, optimizer=optimizer)
    for _ in life.steps():
        optimizer.zero_grad()
        loss = table(torch.randint(0, 50, (12,))).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


# --- every schedule of torch --------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    "step": lambda o: lr_scheduler.StepLR(o, 7),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [5, 11, 23]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 14),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 20),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.95),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 17),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "swa": lambda o: swa_utils.SWALR(o, 0.01, 6),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.2, 9), lr_scheduler.ExponentialLR(o, 0.9)]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.CosineAnnealingLR(o, 20)], [8]),
    "lambda_numpy": lambda o: lr_scheduler.LambdaLR(o, lambda n: np.cos(n / 50)),
}  # fmt: skip


def of_schedule(make: Callable[[torch.optim.Optimizer], Any]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = make(optimizer)
        life.register(model=model, optimizer=optimizer, schedule=schedule)
        yield from train(life, model, optimizer, lambda step, loss: schedule.step())

    return body


LOOPS |= {f"schedule_{name}": of_schedule(make) for name, make in SCHEDULES.items()}


@loop
def schedule_plateau(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
    life.register(model=model, optimizer=optimizer, schedule=schedule)
    yield from train(life, model, optimizer, lambda step, loss: schedule.step(loss.item()))


# --- modules ------------------------------------------------------------------------------------

MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: make_mlp(nn.BatchNorm1d(24), nn.ReLU()),
    "batch_norm_cumulative": lambda: make_mlp(nn.BatchNorm1d(24, momentum=None)),
    "dropout": lambda: make_mlp(nn.Dropout(0.3), nn.GELU()),
    "layer_norm": lambda: make_mlp(nn.LayerNorm(24), nn.SiLU()),
    "spectral_norm": lambda: make_mlp(parametrizations.spectral_norm(nn.Linear(24, 24))),
    "weight_norm": lambda: make_mlp(parametrizations.weight_norm(nn.Linear(24, 24))),
    "old_spectral_norm": lambda: make_mlp(torch.nn.utils.spectral_norm(nn.Linear(24, 24))),
    "orthogonal": lambda: make_mlp(parametrizations.orthogonal(nn.Linear(24, 24))),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(24), nn.LazyBatchNorm1d(), nn.LazyLinear(4)),
    "prelu": lambda: make_mlp(nn.PReLU(), nn.RReLU()),
    "bfloat16": lambda: nn.Sequential(ToType(torch.bfloat16), make_mlp().bfloat16()),
    "double": lambda: nn.Sequential(ToType(torch.float64), make_mlp().double()),
    "bank_that_grows": lambda: nn.Sequential(nn.Linear(16, 4), Bank()),
    "buffer_not_persistent": lambda: nn.Sequential(nn.Linear(16, 4), Centre()),
    "buffer_that_was_none": lambda: nn.Sequential(nn.Linear(16, 4), FirstCentre()),
    "buffer_of_the_first_pass": lambda: nn.Sequential(nn.Linear(16, 4), LateCentre()),
    "extra_state": lambda: nn.Sequential(nn.Linear(16, 4), Counting()),
    "transposed": lambda: make_transposed(),
    "shared_module": lambda: make_mlp(*[shared := nn.Linear(24, 24), nn.Tanh(), shared]),
    "trimmed_state_dict": lambda: Trimmed(),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.Flatten(), nn.Linear(16, 4)),
}  # fmt: skip


class ToType(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Bank(nn.Module):
    """A memory of features that grows, up to a length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        bank = self.bank
        self.bank = torch.cat([bank, x.detach()[:2]])[-30:]
        return x + 0.1 * bank.mean(0) if len(bank) else x


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.centre


class FirstCentre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        return x - self.centre


class LateCentre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "centre"):
            self.register_buffer("centre", x.detach().mean(0))
        return x - self.centre


class Counting(nn.Module):
    """What it computes depends on a number that only `get_extra_state` has."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * (1.0 + 0.01 * self.passes)

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Trimmed(nn.Module):
    """Leaves its frozen part out of the state dict, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(16, 24).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.back(x)))

    def state_dict(self, *args: Any, **words: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **words)
        return {key: value for key, value in whole.items() if "back" not in key}


def make_transposed() -> nn.Module:
    model = make_mlp()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def of_module(make: Callable[[], nn.Module]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model = make()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer)

    return body


LOOPS |= {f"module_{name}": of_module(make) for name, make in MODULES.items()}


@loop
def module_lstm(life: Life) -> Iterator[Tensor]:
    model, head = nn.LSTM(4, 8, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.01)
    life.register(model=model, head=head, optimizer=optimizer)
    for _ in life.steps():
        optimizer.zero_grad()
        loss = head(model(draw(8, 5, 4))[0][:, -1]).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


@loop
def module_conv_channels_last_fused(life: Life) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = draw(4, 3, 8, 8).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = (model(x) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


@loop
def module_tied_weights(life: Life) -> Iterator[Tensor]:
    table, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Tanh(), head)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        ids = torch.randint(0, 20, (16,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids), ids.roll(1))
        loss.backward()
        optimizer.step()
        yield loss


@loop
def module_complex(life: Life) -> Iterator[Tensor]:
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        optimizer.zero_grad()
        loss = (torch.randn(4, 8, dtype=torch.complex64) @ model["weight"]).abs().square().mean()
        loss.backward()
        optimizer.step()
        yield loss


@loop
def module_unfrozen_at_a_step(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        if step == 6:
            model[0].requires_grad_(True)

    yield from train(life, model, optimizer, after)


@loop
def module_frozen_at_a_step(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        if step == 6:
            model[2].requires_grad_(False)

    yield from train(life, model, optimizer, after)


@loop
def module_in_evaluation_from_a_step_on(life: Life) -> Iterator[Tensor]:
    model = make_mlp(nn.BatchNorm1d(24), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        if step == 6:
            model[1].eval()

    yield from train(life, model, optimizer, after)


# --- what else a script has ---------------------------------------------------------------------


@loop
def parameter_of_no_model(life: Life) -> Iterator[Tensor]:
    model, weights = make_mlp(), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), weights], lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        y = model(draw(32, 16))
        parts = torch.stack([y.square().mean(), (y - 1).abs().mean()])
        optimizer.zero_grad()
        loss = (parts * torch.exp(-weights) + weights).sum()
        loss.backward()
        optimizer.step()
        yield loss


@loop
def group_added_at_a_step(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        if step == 6:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.003})

    yield from train(life, model, optimizer, after)


@loop
def gradients_accumulated_over_steps(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for step in life.steps():
        loss = model(draw(8, 16)).square().mean()
        loss.backward()
        if step % 7 == 6:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


@loop
def one_of_two_optimizers_accumulates(life: Life) -> Iterator[Tensor]:
    first, second = make_mlp(), make_mlp()
    one = torch.optim.Adam(first.parameters(), lr=0.01)
    two = torch.optim.SGD(second.parameters(), lr=0.1)
    life.register(first=first, second=second, one=one, two=two)
    for step in life.steps():
        x = draw(8, 16)
        one.zero_grad()
        loss = (first(x) - second(x)).square().mean()
        loss.backward()
        one.step()
        if step % 5 == 4:
            two.step()
            two.zero_grad()
        yield loss


@loop
def two_optimizers_in_turns(life: Life) -> Iterator[Tensor]:
    maker, judge = make_mlp(), make_mlp()
    one = torch.optim.Adam(maker.parameters(), lr=0.01)
    two = torch.optim.RMSprop(judge.parameters(), lr=0.01)
    life.register(maker=maker, judge=judge, one=one, two=two)
    for step in life.steps():
        x = draw(8, 16)
        loss = (maker(x) - judge(x)).square().mean()
        chosen = one if step % 2 else two
        one.zero_grad()
        two.zero_grad()
        loss.backward()
        chosen.step()
        yield loss


class Outer(torch.optim.Optimizer):
    """Steps by an optimizer inside, which has the state: as ZeroRedundancyOptimizer."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.01})
        self.inner = torch.optim.Adam(parameters, lr=0.01)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@loop
def optimizer_inside_another(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = Outer(model.parameters())
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


class Counted(torch.optim.SGD):
    """Keeps a number in its state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        state: dict[Any, Any] = self.state
        state["all"] = {"steps": state.get("all", {}).get("steps", 0) + 1}
        for group in self.param_groups:
            group["lr"] = 0.1 / state["all"]["steps"]
        super().step()


@loop
def optimizer_state_of_no_parameter(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = Counted(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


@loop
def optimizer_registered_between_two_loops(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    head = torch.optim.Adam(model[2].parameters(), lr=0.02)
    life.register(model=model, head=head)
    yield from train(life, model, head, until=9)
    whole = torch.optim.Adam(model.parameters(), lr=0.005)
    life.register(whole=whole)
    yield from train(life, model, whole)


class Replay:
    def __init__(self) -> None:
        self.seen, self.count = np.zeros((40, 16), "float32"), np.int64(0)

    def add(self, row: Any) -> None:
        self.seen[self.count % 40] = row
        self.count += 1

    def draw(self) -> Tensor:
        return torch.from_numpy(self.seen[np.random.randint(0, min(int(self.count), 40), 16)])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "count": self.count, "names": [np.str_("a"), ("b", 2.5)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["count"], np.int64)
        self.seen[:], self.count = state["seen"], state["count"]


@loop
def numpy_arrays_in_an_object(life: Life) -> Iterator[Tensor]:
    model, replay = make_mlp(), Replay()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer, replay=replay)
    for _ in life.steps():
        replay.add(np.random.randn(16))
        optimizer.zero_grad()
        loss = model(replay.draw()).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


@loop
def random_numbers_of_all_kinds(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = draw(8, 16) * random.random() + float(np.random.rand())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


class Own:
    """A generator of the script's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


@loop
def generator_of_ones_own(life: Life) -> Iterator[Tensor]:
    model, own = make_mlp(), Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer, own=own)
    yield from train(
        life, model, optimizer, batch=lambda: torch.randn(8, 16, generator=own.generator)
    )


@loop
def averaged_model(life: Life) -> Iterator[Tensor]:
    model = make_mlp(nn.BatchNorm1d(24))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, average=average, optimizer=optimizer)
    for _ in life.steps():
        x = draw(16, 16)
        optimizer.zero_grad()
        loss = (model(x) - average(x).detach()).square().mean() + model(x).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        yield loss


@loop
def averaged_weights_in_the_model_for_a_moment(life: Life) -> Iterator[Tensor]:
    """Evaluate averaged weights at the top of the loop: they are put in by `.data`, and back."""
    model = make_mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    life.register(model=model, average=average, optimizer=optimizer)
    for _ in life.steps():
        kept = [p.data.clone() for p in model.parameters()]
        for p, mean in zip(model.parameters(), average.parameters(), strict=True):
            p.data.copy_(mean.data)
        told = model(torch.ones(4, 16)).mean().detach()
        for p, back in zip(model.parameters(), kept, strict=True):
            p.data.copy_(back)
        optimizer.zero_grad()
        loss = model(draw(16, 16)).square().mean() + told
        loss.backward()
        optimizer.step()
        for p, mean in zip(model.parameters(), average.parameters(), strict=True):
            mean.data.mul_(0.9).add_(p.data, alpha=0.1)
        yield loss


@loop
def gradients_scaled_and_clipped(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    life.register(model=model, optimizer=optimizer, scaler=scaler)
    for _ in life.steps():
        optimizer.zero_grad()
        loss = model(draw(16, 16)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield loss


@loop
def weights_clamped_by_hand(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)

    yield from train(life, model, optimizer, after)


@loop
def groups_with_rates_of_their_own(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.0},
         {"params": model[2].parameters()}], lr=0.005)  # fmt: skip
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        optimizer.param_groups[0]["lr"] *= 0.97

    yield from train(life, model, optimizer, after)


@loop
def mixed_precision(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(draw(16, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
        yield loss


class Averaging(torch.optim.Optimizer):
    """Keeps 32-bit moments of 16-bit parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros(p.shape))
                mean.mul_(0.9).add_(p.grad.float(), alpha=0.1)
                p.add_(mean.to(p.dtype), alpha=-group["lr"])


@loop
def moments_of_another_type(life: Life) -> Iterator[Tensor]:
    model = nn.Sequential(ToType(torch.bfloat16), make_mlp().bfloat16())
    optimizer = Averaging(model.parameters())
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


@loop
def loader_with_persistent_workers(life: Life) -> Iterator[Tensor]:
    """A step is a pass over the data, which is shuffled."""
    rows = TensorDataset(draw(24, 16))
    loader = DataLoader(rows, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    model = make_mlp(nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        yield loss


# --- loops of public reports ----------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: two passes a step, of which the first climbs. It holds its optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=group.get("rho", 0.05))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        raise AssertionError("it has two steps")


@loop
def sharpness_aware_steps(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = Sam(model.parameters())
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = draw(16, 16)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.first_step()
        model(x).square().mean().backward()
        optimizer.second_step()
        yield loss


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow every third step; its counter is a plain attribute."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner, self.counter = inner, 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.counter += 1
        if self.counter % 3 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)


@loop
def lookahead(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


@loop
def averaged_weights_and_their_rate(life: Life) -> Iterator[Tensor]:
    model = make_mlp(nn.BatchNorm1d(24))
    average = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    flat = swa_utils.SWALR(optimizer, 0.02, 4)
    life.register(model=model, average=average, optimizer=optimizer, cosine=cosine, flat=flat)

    def after(step: int, loss: Tensor) -> None:
        if step < 6:
            cosine.step()
        else:
            average.update_parameters(model)
            flat.step()

    yield from train(life, model, optimizer, after)


@loop
def steps_that_the_scaler_skips(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    life.register(model=model, optimizer=optimizer, scaler=scaler, schedule=schedule)
    for step in life.steps():
        optimizer.zero_grad()
        loss = model(draw(16, 16)).square().mean()
        scaler.scale(loss * (float("inf") if step % 4 == 3 else 1.0)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        yield loss * scaler.get_scale()


class Annealed(nn.Module):
    """Its temperature is a number, and its usage a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.passes = 2.0, 0
        self.usage = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature *= 0.97
            self.passes += 1
            self.usage += x.detach().mean(0).abs()
            self.newest = x.detach()[0].clone()
        return x / self.temperature - 0.01 * self.usage + 0.001 * self.newest


@loop
def module_annealed_by_plain_attributes(life: Life) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(16, 4), Annealed())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


class Recurrent(nn.Module):
    """Carries its hidden state from step to step, as truncated backpropagation does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 8)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, None if self.hidden is None else self.hidden.detach())
        return self.hidden


@loop
def hidden_state_carried_across_steps(life: Life) -> Iterator[Tensor]:
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer, batch=lambda: draw(4, 16))


@loop
def quantization_aware(life: Life) -> Iterator[Tensor]:
    model = make_mlp(nn.ReLU()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It moves to another library.
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        model = torch.ao.quantization.prepare_qat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    life.register(model=model, optimizer=optimizer)

    def after(step: int, loss: Tensor) -> None:
        if step == 9:
            model.apply(torch.ao.quantization.disable_observer)

    yield from train(life, model, optimizer, after)


@loop
def ensemble_of_functional_models(life: Life) -> Iterator[Tensor]:
    base = make_mlp()
    stacked, _ = torch.func.stack_module_state([make_mlp() for _ in range(3)])
    weights = {name: p.detach().requires_grad_() for name, p in stacked.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.01)
    life.register(optimizer=optimizer)

    def call(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(base, parameters, (x,))

    for _ in life.steps():
        optimizer.zero_grad()
        loss = torch.vmap(call, (0, None))(weights, draw(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


class Curriculum:
    """How hard samples may be follows the mean loss; also the order of rows, by a generator."""

    def __init__(self) -> None:
        self.level, self.recent = 1.0, [1.0] * 3
        self.generator = torch.Generator().manual_seed(3)

    def draw(self) -> Tensor:
        return torch.randn(8, 16, generator=self.generator) * self.level

    def note(self, loss: float) -> None:
        self.recent = [*self.recent[1:], loss]
        self.level *= 1.1 if sum(self.recent) / 3 < 0.2 else 0.95

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.recent = state["level"], list(state["recent"])
        self.generator.set_state(state["generator"])


@loop
def curriculum_by_loss(life: Life) -> Iterator[Tensor]:
    model, curriculum = make_mlp(), Curriculum()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer, curriculum=curriculum)
    yield from train(
        life, model, optimizer, lambda _, loss: curriculum.note(loss.item()), curriculum.draw
    )


class Places(torch.utils.data.Sampler[int]):
    """A sampler that knows its place."""

    def __init__(self) -> None:
        self.place, self.order = 0, torch.randperm(40).tolist()

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield self.order[self.place % 40]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.order = state["place"], state["order"]


@loop
def sampler_of_ones_own(life: Life) -> Iterator[Tensor]:
    rows, model, places = draw(40, 16), make_mlp(), Places()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer, places=places)
    stream: list[Iterator[int]] = []

    def batch() -> Tensor:
        stream[:] = stream or [iter(places)]  # After the resume.
        return torch.stack([rows[next(stream[0])] for _ in range(8)])

    yield from train(life, model, optimizer, batch=batch)


@loop
def weights_pruned_and_parametrized(life: Life) -> Iterator[Tensor]:
    model = make_mlp(parametrizations.weight_norm(nn.Linear(24, 24)))
    prune.l1_unstructured(model[0], "weight", 0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


@loop
def compiled_model(life: Life) -> Iterator[Tensor]:
    model = make_mlp(nn.BatchNorm1d(24), nn.Dropout(0.2))
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    life.register(model=compiled, optimizer=optimizer)
    yield from train(life, compiled, optimizer)


class Codebook(nn.Module):
    """Vectors that move without gradients: dead ones get random values."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(8, 4), requires_grad=False)
        self.counts = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.vectors).argmin(1)
        self.counts = 0.8 * self.counts + 0.2 * torch.bincount(nearest, minlength=8)
        for index in nearest.unique():
            mean = x.detach()[nearest == index].mean(0)
            self.vectors.data[index].mul_(0.9).add_(mean, alpha=0.1)
        dead = self.counts < 0.3
        self.vectors.data[dead] = torch.randn(int(dead.sum()), 4)
        return x + (self.vectors[nearest] - x).detach() + 0.1 * x


@loop
def codebook_that_moves_by_hand(life: Life) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(16, 4), Codebook())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


@loop
def gradients_clipped_by_a_moving_norm(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = Clipped(model.parameters(), lr=0.05)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


class Clipped(torch.optim.SGD):
    norm = 0.01

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        found = float(nn.utils.clip_grad_norm_(parameters, self.norm))
        self.norm = 0.9 * self.norm + 0.1 * found
        super().step()

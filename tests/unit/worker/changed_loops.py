"""Loops that change, beside their state, what they are made of, or what they read from.

Those of `CHANGED` are equal after two kills. Those of `TOLD` are named before the first checkpoint.
"""

import io
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from tests.unit.worker.exact_life import STEPS, Life
from tests.unit.worker.exact_loops import Loop, draw, make_mlp, train
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

CHANGED: dict[str, Loop] = {}
TOLD: dict[str, tuple[Loop, str]] = {}


def changed(body: Loop) -> Loop:
    CHANGED[body.__name__] = body
    return body


def told(what: str) -> Callable[[Loop], Loop]:
    """Expect that perdure names `what`."""

    def note(body: Loop) -> Loop:
        TOLD[body.__name__] = body, what
        return body

    return note


def make(*middle: nn.Module) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = make_mlp(*(middle or (nn.BatchNorm1d(24), nn.Dropout(0.3), nn.ReLU())))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def learn(optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


# --- layers and optimizers of torch --------------------------------------------------------------

CHANGES: dict[str, Callable[[int, Any, Any], object]] = {}


def of_change(change: Callable[[int, Any, Any], object]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model, optimizer = make()
        life.register(model=model, optimizer=optimizer)
        for step in life.steps():
            change(step, model, optimizer)
            yield learn(optimizer, (model(draw(8, 16)) - 1).square().mean())

    return body


def lower_momentum(step: int, model: Any, optimizer: Any) -> None:
    """As PointNet++: each decay begins with the momentum of now."""
    model.eval() if step % 2 else model.train()  # It uses the averages.
    model[1].momentum = max(model[1].momentum * 0.8, 0.01)


def lower_dropout(step: int, model: Any, optimizer: Any) -> None:
    """salesforce/awd-lstm-lm#56."""
    model[2].p *= 0.9


def scale_by_an_attribute(step: int, model: Any, optimizer: Any) -> None:
    optimizer.scale = getattr(optimizer, "scale", 1.0) * 0.9
    optimizer.param_groups[0]["lr"] = 0.01 * optimizer.scale


for _change in (lower_momentum, lower_dropout, scale_by_an_attribute):
    CHANGED[_change.__name__] = of_change(_change)


def swap_activation(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        model[3] = nn.Tanh()


def clamp(optimizer: Any, *_: Any) -> None:
    for one in optimizer.param_groups[0]["params"]:
        one.grad.clamp_(-1e-3, 1e-3)


def hook_module(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        model[0].register_forward_hook(lambda _, x, y: y * 2)


def hook_parameter(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        model[0].weight.register_hook(lambda g: g * 0.1)


def hook_optimizer(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        optimizer.register_step_pre_hook(clamp)


def average_in_an_attribute(step: int, model: Any, optimizer: Any) -> None:
    for one in model.parameters():
        one.average = 0.9 * getattr(one, "average", 0.0) + 0.1 * float(one.detach().mean())
        one.data.sub_(0.01 * one.average)


for _change, _what in (
    (swap_activation, "model.3"),
    (hook_module, "model.0"),
    (hook_parameter, "model.0"),
    (hook_optimizer, "optimizer"),
    (average_in_an_attribute, "model.0"),
):
    TOLD[_change.__name__] = of_change(_change), _what


def of_growth(change: Callable[[Any, Any], object]) -> Loop:
    """A life after the change refuses the checkpoint: so there is one life only, which says it."""

    def body(life: Life) -> Iterator[Tensor]:
        inner = nn.Linear(16, 16)
        inner.weight = (first := nn.Linear(16, 16)).weight
        model = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), inner, nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        life.register(model=model, optimizer=optimizer)
        for step in life.steps():
            if step == 2:
                change(model, optimizer)
            yield learn(optimizer, (model(draw(8, 16)) - 1).square().mean())

    return body


def append_layer(model: Any, optimizer: Any) -> None:
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model[-1].parameters()})


def prune_layer(model: Any, optimizer: Any) -> None:
    """jshilong/FisherPruning#21."""
    prune.l1_unstructured(model[0], "weight", 0.5)


def untie_layers(model: Any, optimizer: Any) -> None:
    model[3].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer.add_param_group({"params": [model[3].weight]})


def use_doubles(model: Any, optimizer: Any) -> None:
    model.double().register_forward_pre_hook(lambda _, x: (x[0].double(),))


GROWN = {
    one.__name__: (of_growth(one), what)
    for one, what in (
        (append_layer, "model"),
        (prune_layer, "model"),
        (untie_layers, "model"),
        (use_doubles, "model"),
    )
}
"""What changes the parameters: a resumed script cannot take them."""


@changed
def gradients_that_fade(life: Life) -> Iterator[Tensor]:
    """Gradients are halved, and never cleared."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = (model(draw(8, 16)) - 1).square().mean()
        for one in model.parameters():
            if one.grad is not None:
                one.grad.mul_(0.5)
        loss.backward()
        optimizer.step()
        yield loss


@changed
def gradients_that_are_cleared_at_times(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for step in life.steps():
        if step % 3 == 0:
            optimizer.zero_grad()
        loss = (model(draw(8, 16)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


class Lookahead(torch.optim.Optimizer):
    """It never calls the constructor of `Optimizer`, as AcceleratedOptimizer and others."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for group in self.param_groups:
            for one in group["params"] if group["counter"] == 0 else ():
                slow = self.state[one].setdefault("slow", one.data.clone())
                slow += (one.data - slow) * 0.5
                one.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % 5


@changed
def optimizer_that_was_never_initialized(life: Life) -> Iterator[Tensor]:
    model, inner = make(nn.Tanh())
    optimizer = Lookahead(inner)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = (model(draw(8, 16)) - 1).square().mean()
        inner.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


# --- modules of the script ------------------------------------------------------------------------


class Net(nn.Module):
    calls = 0
    seen: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.warm = nn.Linear(16, 4), 3.0
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x) * self.find_scale())

    def find_scale(self) -> float:
        return 1.0


class Forgets(Net):
    """It deletes an attribute."""

    def find_scale(self) -> float:
        if not hasattr(self, "warm"):
            return 1.0
        self.left = getattr(self, "left", 3) - 1
        if not self.left:
            del self.warm
        return 3.0


class CountsInItsClass(Net):
    def find_scale(self) -> float:
        CountsInItsClass.calls += 1
        return 1 + CountsInItsClass.calls / 10


class CountsInAList(Net):
    seen: ClassVar[list[float]] = []

    def find_scale(self) -> float:
        self.seen.append(0.1)
        return 1 + sum(self.seen)


class CountsInADefault(Net):
    def find_scale(self, seen: dict[str, int] = {}) -> float:  # noqa: B006
        seen["calls"] = seen.get("calls", 0) + 1
        return 1 + seen["calls"] / 10


def of_net(kind: type[Net]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        kind.calls, kind.find_scale.__defaults__ = 0, ({},)
        kind.seen.clear()
        if kind is not CountsInADefault:
            kind.find_scale.__defaults__ = None
        model = kind()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer)

    return body


CHANGED["Forgets"] = of_net(Forgets)
for _kind in (CountsInItsClass, CountsInAList, CountsInADefault):
    TOLD[_kind.__name__] = of_net(_kind), _kind.__name__


@told("model.act")
def activation_that_is_an_attribute(life: Life) -> Iterator[Tensor]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for step in life.steps():
        if step == 2:
            model.act = torch.tanh
        yield learn(optimizer, (model(draw(8, 16)) - 1).square().mean())


# --- names and functions --------------------------------------------------------------------------


@told("criterion")
def criterion_that_is_swapped(life: Life) -> Iterator[Tensor]:
    model, optimizer = make()
    criterion: nn.Module = nn.L1Loss()
    life.register(model=model, optimizer=optimizer)
    for step in life.steps():
        if step == 2:
            criterion = nn.MSELoss()
        yield learn(optimizer, criterion(model(draw(8, 16)), torch.ones(8, 4)))


def blur(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def hide(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.5)


@told("augment")
def augmentation_that_is_swapped(life: Life) -> Iterator[Tensor]:
    model, optimizer = make()
    augment = blur
    life.register(model=model, optimizer=optimizer)
    for step in life.steps():
        if step == 2:
            augment = hide
        yield learn(optimizer, (model(augment(draw(8, 16))) - 1).square().mean())


@told("student")
def models_that_change_places(life: Life) -> Iterator[Tensor]:
    (one, first), (other, second) = make(), make()
    life.register(one=one, other=other, first=first, second=second)
    student, teacher, optimizer, idle = one, other, first, second
    for step in life.steps():
        if step % 4 == 1:
            student, teacher, optimizer, idle = teacher, student, idle, optimizer
        x = draw(8, 16)
        yield learn(optimizer, (student(x) - teacher(x).detach() - 1).square().mean())


_centre = [torch.zeros(16)]


@torch.no_grad()
def subtract_centre(x: Tensor) -> Tensor:
    _centre[0] = 0.5 * _centre[0] + 0.5 * x.mean(0)
    return x - _centre[0]


@told("_centre")
def function_that_a_library_decorates(life: Life) -> Iterator[Tensor]:
    _centre[0] = torch.zeros(16)
    model, optimizer = make()
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        yield learn(optimizer, (model(subtract_centre(draw(8, 16))) - 1).square().mean())


@told("weights")
def long_list_of_which_a_few_change(life: Life) -> Iterator[Tensor]:
    """Priorities of samples."""
    model, optimizer = make()
    weights = [1.0] * 100_000
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = weights[1] * (model(draw(8, 16)) - 1).square().mean()
        learn(optimizer, loss)
        weights[1] = loss.item()
        yield loss


@told("enumerate()")
def steps_that_are_counted_beside(life: Life) -> Iterator[Tensor]:
    model, optimizer = make()
    life.register(model=model, optimizer=optimizer)
    for number, _ in enumerate(life.steps()):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        yield learn(optimizer, (model(draw(8, 16)) - 1).square().mean())


@told("zip()")
def batches_that_are_read_beside(life: Life) -> Iterator[Tensor]:
    model, optimizer = make()
    batches = [draw(8, 16) for _ in range(STEPS)]
    life.register(model=model, optimizer=optimizer)
    for _, x in zip(life.steps(), batches, strict=False):
        yield learn(optimizer, (model(x) - 1).square().mean())


# --- data -----------------------------------------------------------------------------------------


def of_loader(make_loader: Callable[[], tuple[Any, Callable[[Any, Tensor], object]]]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model, optimizer = make()
        loader, after = make_loader()
        life.register(model=model, optimizer=optimizer)
        for _ in life.steps():
            for several in loader:
                x = several[0] if isinstance(several, list) else several
                loss = learn(optimizer, (model(x.float()) - several[-1].mean()).square().mean())
                after(several, loss)
            yield loss

    return body


def change_nothing(several: Any, loss: Tensor) -> None:
    """Do nothing."""


def relabel() -> Any:
    data = TensorDataset(draw(16, 16), draw(16, 1))
    loader = DataLoader(data, batch_size=8)
    return loader, lambda several, loss: data.tensors[1].mul_(0.9).add_(loss.detach())


def choose_again() -> Any:
    data = Subset(TensorDataset(draw(64, 16)), list(range(16)))
    loader = DataLoader(data, batch_size=8, drop_last=True)

    def after(several: Any, loss: Tensor) -> None:
        data.indices = [(7 * one + 3) % 64 for one in data.indices]

    return loader, after


def draw_by_loss() -> Any:
    sampler = WeightedRandomSampler(torch.ones(16).tolist(), 16)
    loader = DataLoader(TensorDataset(draw(16, 16), torch.arange(16.0)), 8, sampler=sampler)

    def after(several: Any, loss: Tensor) -> None:
        sampler.weights[several[1].long()] += loss.item()

    return loader, after


class Counted(Dataset[Tensor]):
    """It grows what it gives from sample to sample."""

    def __init__(self) -> None:
        self.rows, self.level, self.cache = draw(16, 16), 1.0, dict[int, Tensor]()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Tensor:
        self.level *= 1.01
        return self.rows[number] * self.level


class Cached(Counted):
    """It keeps what it has made, which changes nothing."""

    def __getitem__(self, number: int) -> Tensor:
        self.cache[number] = self.rows[number]
        return self.cache[number]


_chance = np.random.default_rng(0)


class Drawing(Counted):
    """It draws from a generator of the script."""

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number] * float(_chance.random())


def mix(rows: list[tuple[Tensor, ...]]) -> Tensor:
    return torch.stack([one[0] for one in rows]) * float(_chance.beta(0.2, 0.2))


def begin_chance(make_loader: Callable[[], Any]) -> Callable[[], Any]:
    def begin() -> Any:
        _chance.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return make_loader()

    return begin


def mixed() -> Any:
    return DataLoader(TensorDataset(draw(16, 16)), 8, collate_fn=mix), change_nothing


for _make, _what in (
    (relabel, "loader"),
    (choose_again, "loader"),
    (draw_by_loss, "loader"),
    (begin_chance(mixed), "_chance"),
):
    TOLD[f"data_{_what}_{len(TOLD)}"] = of_loader(_make), _what
TOLD["dataset_that_counts"] = (
    of_loader(lambda: (DataLoader(Counted(), 8), change_nothing)),
    "loader.dataset",
)
TOLD["dataset_that_draws_from_a_global"] = (
    of_loader(begin_chance(lambda: (DataLoader(Drawing(), 8), change_nothing))),
    "_chance",
)
CHANGED["dataset_with_a_cache"] = of_loader(lambda: (DataLoader(Cached(), 8), change_nothing))


def of_source(begin: Callable[[], Callable[[], Tensor]], names: str) -> Loop:
    """`begin` returns what gives the next batch."""

    def body(life: Life) -> Iterator[Tensor]:
        model, optimizer = make()
        read = begin()
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer, batch=read)

    TOLD[f"source_{begin.__name__}"] = body, names
    return body


def queue_of_a_thread() -> Callable[[], Tensor]:
    batches: queue.Queue[Tensor] = queue.Queue()
    chance = np.random.default_rng(0)

    def fill(num: int) -> None:
        for _ in range(num):
            batches.put(torch.from_numpy(chance.normal(size=(8, 16))).float())

    thread = threading.Thread(target=fill, args=(STEPS,))
    thread.start()
    thread.join()
    return lambda: batches.get()


def lines_of_a_file() -> Callable[[], Tensor]:
    text = io.StringIO("".join(f"{number % 37 / 37}\n" for number in range(4000)))
    return lambda: torch.tensor([[float(text.readline()) for _ in range(16)] for _ in range(8)])


def generator_that_was_begun() -> Callable[[], Tensor]:
    rows = (draw(8, 16) * number for number in itertools.count())
    next(rows)
    return lambda: next(rows)


def numbers_of_sobol() -> Callable[[], Tensor]:
    engine: Any = torch.quasirandom.SobolEngine(16)  # type: ignore[no-untyped-call]
    return lambda: engine.draw(8)


for _begin in (queue_of_a_thread, lines_of_a_file, generator_that_was_begun, numbers_of_sobol):
    of_source(_begin, "batch")

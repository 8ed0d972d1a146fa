"""Loops of public reports whose state is outside of what `state_dict()` has.

Those of `KEPT` are equal after two kills. Those of `NAMED` cannot be: perdure names, before the
first checkpoint, what it does not keep.
"""

import argparse
import copy
import dataclasses
import datetime
import enum
import functools
import itertools
import os
import random
import time
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from tests.unit.worker.exact_life import Life
from tests.unit.worker.exact_loops import Loop, draw, make_mlp, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

KEPT: dict[str, Loop] = {}
NAMED: dict[str, tuple[Loop, str]] = {}


def kept(body: Loop) -> Loop:
    KEPT[body.__name__] = body
    return body


def named(what: str) -> Callable[[Loop], Loop]:
    """Expect that perdure names `what`."""

    def note(body: Loop) -> Loop:
        NAMED[body.__name__] = body, what
        return body

    return note


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for model in models for p in model.parameters()], lr=0.01)


# --- kept: attributes of registered objects -----------------------------------------------------


class Memory(nn.Module):
    """vissl#436, lucidrains/vector-quantize-pytorch#17: features in lists, dicts, and arrays."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(16, 4), kind
        self.rows: list[Any] = []
        self.newest: deque[Tensor] = deque(maxlen=5)
        self.means: dict[str, float] = {"x": 0.0}
        self.counts: Counter[int] = Counter()
        self.by_sign: defaultdict[bool, list[float]] = defaultdict(list)
        self.order: OrderedDict[str, int] = OrderedDict(a=0, b=0)
        self.table = np.zeros(4)
        self.seen: set[int] = set()
        self.phase, self.first = "warm", None

    def forward(self, x: Tensor) -> Tensor:
        y, kind = self.layer(x), self.kind
        mean = float(y.detach().mean())
        if kind == "list":
            self.rows.append((mean, y.detach()[0]))
            return y * (1 + sum(m for m, _ in self.rows)) + self.rows[len(self.rows) // 2][1]
        if kind == "deque":
            self.newest.append(y.detach()[0])
            return y + sum(self.newest)
        if kind == "dict":
            self.means["x"] = 0.9 * self.means["x"] + 0.1 * mean
            self.means[f"n{len(self.means)}"] = mean
            return y - self.means["x"] * len(self.means)
        if kind == "counter":
            self.counts[int(mean * 10)] += 1
            self.by_sign[mean > 0].append(mean)
            self.order.move_to_end("a" if mean > 0 else "b")
            return y * (1 + 0.1 * max(self.counts.values())) + len(self.by_sign[True])
        if kind == "array":
            self.table *= 0.9
            self.table += 0.1 * y.detach().mean(0).numpy()
            return y - torch.from_numpy(self.table).float()
        if kind == "set":
            self.seen.add(int(mean * 100))
            return y * (1 + 0.1 * len(self.seen))
        if self.first is None:
            self.first = np.float64(mean)
        self.phase = "hot" if abs(mean) > 0.05 or self.phase == "hot" else "warm"
        return y * (2.0 if self.phase == "hot" else 1.0) + float(self.first)


def of_memory(kind: str) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model = Memory(kind)
        optimizer = adam(model)
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer)

    return body


KEPT |= {
    f"module_with_a_{kind}": of_memory(kind)
    for kind in ("list", "deque", "dict", "counter", "array", "set", "word")
}


class Drawing(nn.Module):
    """unit8co/darts#2463, deepspeedai/DeepSpeed#8405: generators of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(16, 4), generator

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            noise = float(torch.rand(1, generator=self.generator))
        elif isinstance(self.generator, np.random.Generator | random.Random):
            noise = self.generator.random()
        else:
            noise = self.generator.rand()
        return self.layer(x) * (1 + noise)


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "old_numpy": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
}


def of_generator(make: Callable[[], Any]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model = Drawing(make())
        optimizer = adam(model)
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer)

    return body


KEPT |= {f"module_that_draws_by_{name}": of_generator(make) for name, make in GENERATORS.items()}


class Average:
    """lightly-ai/lightly-train#892: the count of updates is in no state dict."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = 0.9 * (1 - 0.5**self.updates)
        for name, p in model.named_parameters():
            self.shadow[name].mul_(decay).add_(p.detach(), alpha=1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = dict(state)


@kept
def average_whose_count_is_in_no_state_dict(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    average, optimizer = Average(model), adam(model)
    life.register(model=model, optimizer=optimizer, average=average)
    for _ in life.steps():
        x = draw(8, 16)
        loss = (model(x) - 1).square().mean()
        for name, p in model.named_parameters():
            loss = loss + 0.1 * (p - average.shadow[name]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        yield loss


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, value: float) -> float:
        self.sum, self.count = self.sum + value, self.count + 1
        return self.sum / self.count


class Metered(nn.Module):
    """NCAR/miles-credit#473: a helper of the module keeps the mean by which a loss is weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.meters = {"x": Meter(), "y": Meter()}
        self.one = Meter()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        by = self.meters["y"].add(float(y.detach().square().mean())) + self.one.add(1.0)
        return y / (1 + by)


@kept
def helper_objects_of_a_module(life: Life) -> Iterator[Tensor]:
    model = Metered()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


# --- kept: attributes of other kinds ------------------------------------------------------------


class Holding(nn.Module):
    """A module with an attribute that each pass uses and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(16, 4), 0
        self.begin()

    def begin(self) -> None:
        self.value: Any = None

    def use(self, mean: float) -> float:
        return mean

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y: Tensor = self.layer(x)
        return y * (1 + self.use(float(y.detach().mean())))


def of_holding(kind: type[Holding]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model = kind()
        optimizer = adam(model)
        life.register(model=model, optimizer=optimizer)
        yield from train(life, model, optimizer)

    return body


def holding(kind: type[Holding]) -> type[Holding]:
    KEPT[f"module_with_{kind.__name__}"] = of_holding(kind)
    return kind


class Phase(enum.Enum):
    WARM = "warm"
    HOT = "hot"


@holding
class MemberOfAnEnum(Holding):
    def begin(self) -> None:
        self.value = Phase.WARM

    def use(self, mean: float) -> float:
        if self.passes == 3:
            self.value = Phase.HOT
        assert (Phase.WARM.value, Phase.HOT.value) == ("warm", "hot")
        return 1.0 if self.value is Phase.HOT else 0.0


@holding
class TensorOfTwoModules(Holding):
    def begin(self) -> None:
        self.value, self.other = torch.zeros(2), nn.Identity()
        self.other.value = self.value

    def use(self, mean: float) -> float:
        self.value.add_(mean)
        return float(self.other.value.sum())


@holding
class ViewOfATensor(Holding):
    def begin(self) -> None:
        self.whole = torch.zeros(4)
        self.value = self.whole[:2]

    def use(self, mean: float) -> float:
        self.whole.add_(mean)
        return float(self.value.sum())


@holding
class ArrayThatBeginsAgain(Holding):
    """A hidden state begins as an array that stays as it is, and returns to it."""

    def begin(self) -> None:
        self.first = np.zeros(2)
        self.value = self.first

    def use(self, mean: float) -> float:
        self.value = self.value * 0.9 + mean if self.passes % 5 else self.first
        return float(self.value.sum())


@holding
class ListThatBeginsAgain(Holding):
    def begin(self) -> None:
        self.first: list[float] = []
        self.value = self.first

    def use(self, mean: float) -> float:
        self.value = [*self.value, mean] if self.passes % 5 else list(self.first)
        return sum(self.value)


@holding
class ListInADict(Holding):
    def begin(self) -> None:
        self.rows: list[float] = []
        self.value = {"rows": self.rows}

    def use(self, mean: float) -> float:
        self.rows.append(mean)
        return sum(self.value["rows"])


@holding
class NewListWithTwoNames(Holding):
    def use(self, mean: float) -> float:
        if self.value is None:
            self.value = self.again = []
        self.value.append(mean)
        return sum(self.again)


@holding
class GeneratorsInADict(Holding):
    def begin(self) -> None:
        self.value = {"x": [random.Random(1)], "y": np.random.default_rng(1),
                      "z": torch.Generator().manual_seed(1)}  # fmt: skip
        self.same = self.value["y"]

    def use(self, mean: float) -> float:
        drawn = self.value["x"][0].random() + self.value["y"].random() + self.same.random()
        return drawn + float(torch.rand(1, generator=self.value["z"]))


@holding
class GeneratorsMadeLate(Holding):
    def use(self, mean: float) -> float:
        if self.value is None:
            self.value, self.old = np.random.default_rng(1), np.random.RandomState(1)
            self.first, self.torch = random.Random(1), torch.Generator()
        if self.passes % 6 == 0:
            self.first = random.Random(self.passes)
        drawn = self.value.random() + self.old.rand() + self.first.random()
        return float(drawn + torch.rand(1, generator=self.torch))


@holding
class NestedDefaultdict(Holding):
    def begin(self) -> None:
        self.value = defaultdict(lambda: defaultdict(float))

    def use(self, mean: float) -> float:
        if self.passes == 1:
            self.late = defaultdict(list)
        self.late[self.passes].append(mean)
        self.value["x"][int(mean * 50)] += 1.0
        return max(self.value["x"].values()) + len(self.late)


@dataclasses.dataclass(frozen=True)
class Frozen:
    factor: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float = 1.0


@holding
class SmallObjects(Holding):
    def begin(self) -> None:
        self.value, self.slotted = Frozen(), Slotted()
        self.space, self.words = types.SimpleNamespace(n=0.0), argparse.Namespace(rate=1.0)

    def use(self, mean: float) -> float:
        self.value = dataclasses.replace(self.value, factor=self.value.factor * 0.9)
        self.slotted.factor += mean
        self.space.n += mean
        self.words.rate *= 0.9
        return self.value.factor + self.slotted.factor + self.space.n + self.words.rate


@holding
class WhatIsNoPlainData(Holding):
    """Nothing of it changes; the registration goes on all the same."""

    def begin(self) -> None:
        self.value: list[Any] = []
        self.value.append(self.value)
        with warnings.catch_warnings(action="ignore"):
            self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.late, self.system = None, random.SystemRandom()

    def use(self, mean: float) -> float:
        self.late = torch.empty(3, device="meta")
        return 0.0


@kept
def plain_tensor_that_an_optimizer_steps(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    model.factor = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), model.factor], lr=0.01)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = (model(draw(8, 16)) * model.factor.exp() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


# --- named: attributes that a resumed script begins without ---------------------------------------


def unkept(kind: type[Holding]) -> type[Holding]:
    NAMED[f"module_with_{kind.__name__}"] = of_holding(kind), "model.value"
    return kind


@unkept
class ObjectMadeLate(Holding):
    def use(self, mean: float) -> float:
        self.value = self.value or Meter()
        return self.value.add(mean)


@unkept
class ObjectsInAList(Holding):
    def begin(self) -> None:
        self.value: list[Slotted] = []

    def use(self, mean: float) -> float:
        self.value.append(Slotted(mean))
        return sum(one.factor for one in self.value)


class First:
    def __init__(self) -> None:
        self.left = 3

    def use(self, owner: Any) -> float:
        self.left -= 1
        if not self.left:
            owner.value = Second()
        return 0.0


class Second:
    def use(self, owner: Any) -> float:
        return 1.0


@unkept
class AnotherClass(Holding):
    def begin(self) -> None:
        self.value = First()

    def use(self, mean: float) -> float:
        return self.value.use(self)


def make_sum() -> Callable[[float], float]:
    total = 0.0

    def add(mean: float) -> float:
        nonlocal total
        total += mean
        return total

    return add


@unkept
class MemberOfAnEnumOfAFunction(Holding):
    def begin(self) -> None:
        class Local(enum.Enum):
            WARM = 1.0
            HOT = 2.0

        self.value = Local.WARM

    def use(self, mean: float) -> float:
        if self.passes == 3:
            self.value = type(self.value)(2.0)
        return float(self.value.value)


@unkept
class FunctionThatCounts(Holding):
    def begin(self) -> None:
        self.value = make_sum()

    def use(self, mean: float) -> float:
        return self.value(mean)


@unkept
class IteratorThatGoesOn(Holding):
    def begin(self) -> None:
        self.value = itertools.cycle([0.0, 1.0, 2.0])

    def use(self, mean: float) -> float:
        return next(self.value)


# --- named: unregistered values -------------------------------------------------------------------


@named("mean")
def number_of_the_loop(life: Life) -> Iterator[Tensor]:
    """NCAR/miles-credit#473: the loss is divided by its own running mean."""
    model = make_mlp()
    optimizer, mean = adam(model), 1.0
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean() / mean
        mean = 0.9 * mean + 0.1 * loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@named("best")
def patience_of_the_loop(life: Life) -> Iterator[Tensor]:
    """MIC-DKFZ/nnUNet#2431: the rate falls after three losses that are no better."""
    model = make_mlp()
    optimizer, best, bad = torch.optim.SGD(model.parameters(), lr=0.1), 9.0, 0
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if loss.item() < best:
            best, bad = loss.item(), 0
        else:
            bad += 1
        if bad == 2:
            optimizer.param_groups[0]["lr"] *= 0.5
            bad = 0
        optimizer.step()
        yield loss


_mean = 1.0


def divide(loss: Tensor) -> Tensor:
    global _mean
    _mean = 0.9 * _mean + 0.1 * loss.item()
    return loss / _mean


@named("_mean")
def global_of_the_script(life: Life) -> Iterator[Tensor]:
    global _mean
    _mean = 1.0
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = divide(model(draw(8, 16)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@named("divide_by.mean")
def variable_of_a_closure(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    mean = 1.0

    def divide_by(loss: Tensor) -> Tensor:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss.item()
        return loss / mean

    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = divide_by(model(draw(8, 16)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


class Replay:
    """ray-project/ray#8151, nicklashansen/tdmpc2#28."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, float]] = []

    def push(self, x: Tensor) -> None:
        self.rows.append((x, float(x.mean())))

    def sample(self) -> Tensor:
        return torch.stack([x for x, _ in random.choices(self.rows, k=4)])


@named("replay.rows")
def replay_buffer_of_ones_own(life: Life) -> Iterator[Tensor]:
    model, replay = make_mlp(), Replay()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        replay.push(draw(16))
        loss = model(replay.sample()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@named("target")
def target_network_that_follows(life: Life) -> Iterator[Tensor]:
    """philtabor/Actor-Critic-Methods-Paper-To-Code#4, ai2cm/ace#349."""
    model = make_mlp()
    target = copy.deepcopy(model)
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = draw(8, 16)
        with torch.no_grad():
            wanted = target(x) * 0.9 + 0.1
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, q in zip(model.parameters(), target.parameters(), strict=True):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
        yield loss


@named("second")
def second_optimizer_forgotten(life: Life) -> Iterator[Tensor]:
    """dansuh17/segan-pytorch#14, NVlabs/stylegan2-ada-pytorch#108."""
    model, critic = make_mlp(), nn.Linear(4, 1)
    first, second = adam(model), adam(critic)
    life.register(model=model, critic=critic, first=first)
    for _ in life.steps():
        made = model(draw(8, 16))
        other = (critic(made.detach()) - 1).square().mean()
        second.zero_grad()
        other.backward()
        second.step()
        loss = critic(made).square().mean()
        first.zero_grad()
        loss.backward()
        first.step()
        yield loss + other.detach()


@named("scaler")
def scaler_forgotten(life: Life) -> Iterator[Tensor]:
    """A scaler with its first scale skips its first steps again."""
    model = make_mlp()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss * scaler.get_scale()


@named("schedule")
def schedule_forgotten(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer, lambda step, loss: schedule.step())


@named("generator")
def generator_of_the_loop(life: Life) -> Iterator[Tensor]:
    """deepspeedai/DeepSpeed#8405."""
    model, generator = make_mlp(), np.random.default_rng(5)
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = torch.from_numpy(generator.normal(size=(8, 16))).float()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@named("loader.generator")
def generator_of_a_loader(life: Life) -> Iterator[Tensor]:
    """modelscope/ms-swift#9935: an order of the loader's own."""
    loader = DataLoader(TensorDataset(draw(24, 16)), batch_size=8, shuffle=True,
                        generator=torch.Generator().manual_seed(2))  # fmt: skip
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        for (x,) in loader:
            loss = (model(x) - x.mean()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield loss


@named("place in a DataLoader")
def loader_that_is_read_on(life: Life) -> Iterator[Tensor]:
    """huggingface/datasets#5454."""
    loader = DataLoader(TensorDataset(draw(400, 16)), batch_size=8)
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _, (x,) in zip(life.steps(), loader, strict=False):
        loss = (model(x) - x.mean()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for n in itertools.count():
            yield torch.full((16,), (n % 37) / 37)


@named("place in a DataLoader")
def stream_with_a_worker(life: Life) -> Iterator[Tensor]:
    """EvolvingLMMs-Lab/lmms-engine#172."""
    batches = iter(DataLoader(Stream(), batch_size=8, num_workers=1))
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = next(batches)
        loss = (model(x) - x).square().mean() if x.shape[1] == 4 else (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@named("rows")
def generator_function_that_is_read_on(life: Life) -> Iterator[Tensor]:
    def read() -> Iterator[Tensor]:
        for n in itertools.count():
            yield torch.full((8, 16), (n % 37) / 37)

    rows, model = read(), make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = (model(next(rows)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


class Noisy(torch.utils.data.Dataset[Tensor]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rng.normal(size=16)).float() + index


@named("loader.dataset")
def dataset_that_draws(life: Life) -> Iterator[Tensor]:
    """A dataset augments by a generator of its own."""
    loader: DataLoader[Tensor] = DataLoader(Noisy(), batch_size=8)
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        for x in loader:
            loss = (model(x) - x.mean()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield loss


class Trainer:
    """Its loop is a method, and its queue an attribute."""

    def __init__(self) -> None:
        self.model = make_mlp()
        self.optimizer = adam(self.model)
        self.queue: deque[float] = deque(maxlen=4)

    def fit(self, life: Life) -> Iterator[Tensor]:
        life.register(model=self.model, optimizer=self.optimizer)
        for _ in life.steps():
            yield self.step(draw(8, 16))

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss = loss / (1 + sum(self.queue))
        self.queue.append(loss.item())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@named("self.queue")
def attribute_of_a_trainer(life: Life) -> Iterator[Tensor]:
    yield from Trainer().fit(life)


@named("pool")
def pool_of_made_images(life: Life) -> Iterator[Tensor]:
    """junyanz/pytorch-CycleGAN-and-pix2pix#1380: a pool of images made before."""
    model, critic = make_mlp(), nn.Linear(4, 1)
    optimizer = adam(model, critic)
    pool: list[Tensor] = []
    life.register(model=model, critic=critic, optimizer=optimizer)
    for _ in life.steps():
        made = model(draw(8, 16))
        pool.append(made.detach())
        old = pool[random.randrange(len(pool))]
        loss = critic(made).square().mean() + (critic(old) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@named("weigh")
def partial_over_an_object(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    meter = Meter()

    def divide_by(own: Meter, loss: Tensor) -> Tensor:
        return loss / (1 + own.add(loss.item()))

    weigh = functools.partial(divide_by, meter)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = weigh(model(draw(8, 16)).square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


class Hidden(nn.Module):
    """facebookresearch/dino: the teacher lies in a list, so that it is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(16, 4)
        self.teacher = [copy.deepcopy(self.student)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.student.parameters(), self.teacher[0].parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            wanted = self.teacher[0](x)
        return self.student(x) - wanted + 1


@named("model.teacher")
def teacher_hidden_in_a_list(life: Life) -> Iterator[Tensor]:
    model = Hidden()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    yield from train(life, model, optimizer)


class Clip:
    """It clips gradients by the mean of their norms."""

    def __init__(self) -> None:
        self.norms = [0.01]

    def clip(self, model: nn.Module) -> None:
        most = sum(self.norms) / len(self.norms)
        self.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), most)))


@named("clip.norms")
def object_that_clips_by_its_history(life: Life) -> Iterator[Tensor]:
    model, clip = make_mlp(), Clip()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        clip.clip(model)
        optimizer.step()
        yield loss


class Scale:
    """It has numbers only, and begins the backward pass."""

    def __init__(self) -> None:
        self.factor = 1.0

    def start(self, loss: Tensor) -> None:
        self.factor *= 0.9
        (loss * self.factor).backward()


@named("scale.factor")
def object_that_begins_the_backward_pass(life: Life) -> Iterator[Tensor]:
    model, scale = make_mlp(), Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        scale.start(loss)
        optimizer.step()
        yield loss


class Blur:
    """It writes into the tensor that it gets."""

    def __init__(self) -> None:
        self.width = 0.0

    def start(self, x: Tensor) -> None:
        self.width += 0.1
        x[:] = x * self.width


@named("blur.width")
def object_that_writes_into_a_batch(life: Life) -> Iterator[Tensor]:
    model, blur = make_mlp(), Blur()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        x = draw(8, 16)
        blur.start(x)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


_optimizers: list[torch.optim.Optimizer] = []


class Schedule:
    """It reaches an optimizer by a global."""

    def __init__(self) -> None:
        self.steps = 0

    def start(self) -> None:
        self.steps += 1
        for group in _optimizers[0].param_groups:
            group["lr"] = 0.1 / self.steps


@named("schedule.steps")
def object_that_reaches_a_global(life: Life) -> Iterator[Tensor]:
    model, schedule = make_mlp(), Schedule()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _optimizers[:] = [optimizer]
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        schedule.start()
        optimizer.step()
        yield loss


@named("meter.count")
def meter_whose_mean_weighs_the_loss(life: Life) -> Iterator[Tensor]:
    model, meter = make_mlp(), Meter()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        mean = meter.add(loss.item())
        loss = loss / mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


class Level:
    """It only counts; what else has it may train by it."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, value: float) -> None:
        self.count += value > -1


class Levelled(torch.utils.data.Dataset[Tensor]):
    def __init__(self, level: Level) -> None:
        self.level = level

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Tensor:
        return torch.full((16,), (place + self.level.count) / 20)


def step_with(life: Life, level: Level, loader: Any = None) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        for x in loader:
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        level.update(loss.item())
        yield loss


@named("level.count")
def counter_that_a_dataset_has(life: Life) -> Iterator[Tensor]:
    level = Level()
    yield from step_with(life, level, DataLoader(Levelled(level), 8))


def of_hook(add: Callable[[nn.Module, torch.optim.Optimizer, Level], object]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model, level = make_mlp(), Level()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        life.register(model=model, optimizer=optimizer)
        add(model, optimizer, level)
        for _ in life.steps():
            loss = model(draw(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            level.update(loss.item())
            yield loss

    return body


def rate_by(optimizer: torch.optim.Optimizer, level: Level) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + level.count)


HOOKS: dict[str, Callable[[Any, Any, Level], object]] = {
    "module": lambda m, o, one: m.register_forward_hook(lambda _, x, y: y * (1 + one.count)),
    "gradient": lambda m, o, one: m[0].weight.register_hook(lambda g: g * (1 + one.count)),
    "optimizer": lambda m, o, one: o.register_step_pre_hook(lambda *_: rate_by(o, one)),
}
NAMED |= {f"counter_of_a_hook_{n}": (of_hook(add), "level.count") for n, add in HOOKS.items()}
_level = Level()


class ByGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp()

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * (1 + _level.count)


@named("_level.count")
def counter_that_a_forward_uses(life: Life) -> Iterator[Tensor]:
    _level.count = 0
    model = ByGlobal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _level.update(loss.item())
        yield loss


@named("meter.count")
def mean_that_becomes_a_rate(life: Life) -> Iterator[Tensor]:
    model, meter = make_mlp(), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = meter.add(loss.item()) / 10
        for group in optimizer.param_groups:
            group["lr"] = rate
        yield loss


@named("best")
def best_loss_that_becomes_a_rate(life: Life) -> Iterator[Tensor]:
    model, best = make_mlp(), 9.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    group = optimizer.param_groups[0]
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        group["lr"] = best / 10
        yield loss


@named("meter.count")
def mean_that_enters_a_weight(life: Life) -> Iterator[Tensor]:
    model, meter = make_mlp(), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    bias = model[0].bias.detach()
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bias[0] = meter.add(loss.item())
        yield loss


@named("meter.count")
def mean_that_a_print_binds(life: Life) -> Iterator[Tensor]:
    model, meter = make_mlp(), Meter()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        print(mean := 1 + meter.add(random.random()))
        loss = model(draw(8, 16)).square().mean() * mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


class Out(Level):
    def update(self, value: Any) -> None:
        self.count += 1
        torch.mul(value, self.count, out=value)


class Method(Level):
    def update(self, value: Any) -> None:
        self.count += 1
        value.__imul__(self.count)


class Taken(Level):
    def update(self, value: Any) -> None:
        self.count += 1
        self.last = value
        self.last *= self.count


class Handed(Level):
    def update(self, value: Any) -> None:
        self.count += 1
        nn.init.constant_(value, self.count)


def of_argument(make: type[Level]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model, level = make_mlp(), make()
        optimizer = adam(model)
        life.register(model=model, optimizer=optimizer)
        for _ in life.steps():
            x: Any = draw(8, 16)
            level.update(x)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss

    return body


NAMED |= {
    f"argument_changed_by_{one.__name__}": (of_argument(one), "level.count")
    for one in (Out, Method, Taken, Handed)
}


class Steps(Counter[str]):
    """A dict of the script's own class."""


@named("table.steps")
def entries_of_an_own_dict(life: Life) -> Iterator[Tensor]:
    model, table = make_mlp(), Steps()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean() * (1 + table["steps"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table["steps"] += 1
        yield loss


# --- what is only shown is no reason --------------------------------------------------------------


@kept
def means_that_are_only_shown(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    best, total, shown, history = 9.0, 0.0, Meter(), []
    for step in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        total += loss.item()
        history.append(loss.item())
        shown.add(loss.item())
        mean = total / (step + 1)
        if step % 50 == 49:
            print(best, mean, history[-1], shown.sum)
        yield loss


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@kept
def best_model_that_is_saved(life: Life) -> Iterator[Tensor]:
    """As in nanoGPT, makemore, and timm."""
    model = Language()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    best, best_step, first, times = 1e9, -1, None, [1.0]
    for step in life.steps():
        began = time.time()
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.time() - began)
        if first is None or loss.item() < best:
            best, best_step, first = loss.item(), step, step
            torch.save({"model": model.state_dict(), "best": best}, os.devnull)
            print("saved", best_step)
        left = datetime.timedelta(seconds=int(np.mean(times)))
        print(OrderedDict([("best", best)]), left)
        yield loss


@kept
def counts_of_a_namespace(life: Life) -> Iterator[Tensor]:
    model, args = make_mlp(), argparse.Namespace(best=9.0, seen=0, every=5)
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for step in life.steps():
        try:
            loss = model(draw(8, 16)).square().mean()
        except MemoryError:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        args.seen += 8
        args.best = min(args.best, loss.item())
        if step % args.every == 0:
            print(args.seen, args.best)
        yield loss


@kept
def long_lists_that_are_only_shown(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    a, b, c, d, e, f = ([0.5] * 5000 for _ in range(6))
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for one in (a, b, c, d, e, f):
            print(one[-1])
        a.append(loss.item())
        b.append(loss.item())
        c.append(loss.item())
        d.append(loss.item())
        e.append(loss.item())
        f.append(loss.item())
        yield loss


class Progress:
    """As in pytorch/examples: it shows meters, and has no part in training."""

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters

    def display(self, step: int) -> None:
        print(step, *(one.sum / max(1, one.count) for one in self.meters))


class Timer:
    def __init__(self) -> None:
        self.laps: list[float] = []
        self.began: float | None = None

    def __enter__(self) -> "Timer":
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.began is not None
        self.laps.append(time.perf_counter() - self.began)

    def tick(self) -> float:
        self.__exit__()
        self.__enter__()
        return self.laps[-1]


class Accuracy:
    def __init__(self) -> None:
        self.reset()

    def __call__(self, hits: int, total: int) -> float:
        self.hits["all"] += hits
        self.total += total
        return self.hits["all"] / self.total

    def reset(self) -> None:
        self.hits, self.total = {"all": 0}, 0


@kept
def meters_and_timers_that_only_count(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    losses, norms, whole, passes, accuracy = Meter(), Meter(), Timer(), Timer(), Accuracy()
    progress, by_name = Progress(losses, norms), {"rate": Meter()}
    whole.__enter__()
    for step in life.steps():
        with passes:
            out = model(draw(8, 16))
        loss = out.square().mean()
        hits = accuracy((out.argmax(1) == 0).sum(), len(out))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.add(loss.item() * out.size(0))
        by_name["rate"].add(optimizer.param_groups[0]["lr"])
        spent = whole.tick()
        if step % 5 == 4:
            progress.display(step)
            accuracy.reset()
            print(hits, spent, *(f"{name} {one.sum}" for name, one in by_name.items()))
        yield loss


class Summary(enum.Enum):
    NONE = 0
    AVERAGE = 1


class NamedMeter:
    """As in pytorch/examples/imagenet: it can sum over ranks, and print itself."""

    def __init__(self, name: str, kind: Summary = Summary.AVERAGE) -> None:
        self.name, self.kind, self.value, self.sum, self.count = name, kind, 0.0, 0.0, 0

    def update(self, value: Any, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count])
        torch.distributed.all_reduce(total)
        self.sum, self.count = total.tolist()

    def __str__(self) -> str:
        if self.kind is Summary.NONE:
            raise ValueError(self.name)
        return "{name} {value:.3f} {sum:.3f}".format(**self.__dict__)


class Table(Progress):
    def display(self, step: int) -> None:
        entries = [str(step)]
        entries += [str(meter) for meter in self.meters]
        print(" ".join(entries))


@kept
def meters_of_each_pass_over_the_data(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    history: dict[str, list[float]] = {"loss": []}
    for one in range(4):
        times, losses, hits = (
            NamedMeter("time"),
            NamedMeter("loss"),
            NamedMeter("hits", Summary.AVERAGE),
        )
        table, end, lost = Table(times, losses, hits), time.time(), torch.zeros(())
        for step in life.steps(5 * one + 5):
            out = model(draw(8, 16))
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = [(out.argmax(1) == 0).float().mean()]
            losses.update(loss.item(), out.size(0))
            hits.update(right[0], out.shape[0])
            lost += loss.detach()
            history["loss"].append(loss.item())
            times.update(time.time() - end)
            end = time.time()
            if step % 5 == 3:
                table.display(step + 1)
            yield loss
        print(losses, lost, len(history["loss"]))


class Smoothed:
    """As in pytorch/vision/references, detr, and mae: a window, and a mean over all ranks."""

    def __init__(self, window: int = 20, text: str = "{mean:.4f} {last:.4f}") -> None:
        self.window: deque[float] = deque(maxlen=window)
        self.text, self.total, self.count = text, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.window.append(value)
        self.count += n
        self.total += value * n

    def synchronize(self) -> None:
        self.count, self.total = sum_over_ranks([self.count, self.total]).tolist()

    @property
    def mean(self) -> float:
        return torch.tensor(list(self.window), dtype=torch.float32).mean().item()

    def __str__(self) -> str:
        return self.text.format(mean=self.mean, last=self.window[-1])


def has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def sum_over_ranks(values: list[float]) -> Tensor:
    total = torch.tensor(values)
    if has_ranks():
        torch.distributed.all_reduce(total)
    return total


class MetricLogger:
    def __init__(self, between: str = "  ") -> None:
        self.meters: dict[str, Smoothed] = defaultdict(Smoothed)
        self.between = between

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            self.meters[name].update(value.item() if isinstance(value, Tensor) else value)

    def __getattr__(self, name: str) -> Any:
        if name in self.meters:
            return self.meters[name]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __str__(self) -> str:
        return self.between.join(f"{name}: {one}" for name, one in self.meters.items())

    def add_meter(self, name: str, meter: Smoothed) -> None:
        self.meters[name] = meter

    def log_every(self, rows: Any, every: int, header: str) -> Iterator[Any]:
        number, end = 0, time.time()
        turns, data = Smoothed(text="{mean:.4f}"), Smoothed()
        for row in rows:
            data.update(time.time() - end)
            yield row
            turns.update(time.time() - end)
            if number % every == 0:
                left = str(datetime.timedelta(seconds=int(turns.mean * (20 - number))))
                if torch.cuda.is_available():
                    most = torch.cuda.max_memory_allocated() / 1024
                    print(self.between.join([header, str(number), left, str(self), str(most)]))
                else:
                    print(self.between.join([header, left, str(self), str(turns), str(data)]))
            number += 1
            end = time.time()
        print(f"{header} {number}")


@kept
def meters_of_a_logger_that_hands_on_the_steps(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for one in range(4):
        logger = MetricLogger()
        logger.add_meter("rate", Smoothed(window=1))
        for _, _ in enumerate(logger.log_every(life.steps(5 * one + 5), 2, f"pass {one}")):
            began = time.time()
            out = model(draw(8, 16))
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = (out.argmax(1) == 0).float().mean()
            logger.update(loss=loss.item(), rate=optimizer.param_groups[0]["lr"])
            logger.meters["hits"].update(hits.item(), n=out.shape[0])
            logger.meters["rows/s"].update(8 / (time.time() - began))
            yield loss


# --- a mean that leaves the loop, or that others have ---------------------------------------------


@named("meter.count")
def mean_of_a_pass_that_sets_the_rate(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for one in range(4):
        meter = Meter()
        for _ in life.steps(5 * one + 5):
            loss = model(draw(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.add(loss.item())
            yield loss
        optimizer.param_groups[0]["lr"] = meter.count / 50


@named("logger.meters")
def mean_of_a_logger_that_sets_the_rate(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    logger = MetricLogger()
    for _ in logger.log_every(life.steps(), 2, ""):
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=loss.item())
        optimizer.param_groups[0]["lr"] = logger.loss.total / 50
        yield loss


class Paced(MetricLogger):
    def log_every(self, rows: Any, every: int, header: str) -> Iterator[Any]:
        for _ in rows:
            yield 1 + self.meters["loss"].count


@named("self.meters")
def count_that_a_logger_hands_on(life: Life) -> Iterator[Tensor]:
    model, logger = make_mlp(), Paced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for weight in logger.log_every(life.steps(), 2, ""):
        loss = model(draw(8, 16)).square().mean() / weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=loss.item())
        yield loss


_logger = MetricLogger()


@named("self.meters")
def logger_that_a_forward_has(life: Life) -> Iterator[Tensor]:
    _logger.meters.clear()
    model, logger = make_mlp(), _logger
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    model.register_forward_hook(lambda _, x, y: y / (1 + _logger.meters["loss"].count))
    for _ in logger.log_every(life.steps(), 2, ""):
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(loss=loss.item())
        yield loss


@named("state.scale")
def attribute_of_a_namespace(life: Life) -> Iterator[Tensor]:
    model, state = make_mlp(), types.SimpleNamespace(scale=1.0, seen=0)
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean() * state.scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.seen += 1
        state.scale *= 1.1
        yield loss


@named("best")
def best_loss_that_a_module_has(life: Life) -> Iterator[Tensor]:
    model, best = Language(), 9.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(net=model.net, optimizer=optimizer)
    scale = types.SimpleNamespace(by=1.0)
    model.register_forward_hook(lambda _, x, y: y * scale.by)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        scale.by = 1 + best
        yield loss


class Broken(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("it is closed")


@named("weights")
def state_beside_an_object_that_raises(life: Life) -> Iterator[Tensor]:
    model, broken, weights = make_mlp(), Broken(), [1.0]
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean() * weights[0] / (1 + len(broken))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights[0] += 1
        yield loss


class Kept(Level):
    all: ClassVar[list[float]] = []

    def update(self, value: float) -> None:
        self.count += 1


class OfOther(Level):
    """It changes a class by its name."""

    def update(self, value: float) -> None:
        self.count += 1
        Kept.all.append(value)


class ByFunction(Level):
    """It calls a function that reaches further."""

    def update(self, value: float) -> None:
        self.count += 1
        note_loss(value)


class OfFunction(Level):
    """It changes an attribute of a function."""

    def update(self, value: float) -> None:
        self.count += 1
        mark.total += 1  # type: ignore[attr-defined]


def mark(value: float) -> None:
    """Do nothing."""


def note_loss(value: float) -> None:
    _losses.append(value)


def run_pass(life: Life, until: int, model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    meter = Meter()
    for _ in life.steps(until):
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.add(loss.item())
        yield loss
    return meter.count


@kept
def mean_that_a_function_returns_and_a_loop_shows(life: Life) -> Iterator[Tensor]:
    """As in detr, mae, and timm."""
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    for one in range(4):
        count = yield from run_pass(life, 5 * one + 5, model, optimizer)
        print({"count": count, "pass": one})


@named("meter.count")
def mean_that_a_function_returns(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for one in range(4):
        count = yield from run_pass(life, 5 * one + 5, model, optimizer)
        optimizer.param_groups[0]["lr"] = count / 50


@named("meter.count")
def mean_that_a_call_gets(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for one in range(4):
        set_rate(optimizer, (yield from run_pass(life, 5 * one + 5, model, optimizer)))


@named("meter.count")
def mean_that_an_attribute_gets(life: Life) -> Iterator[Tensor]:
    model, scale = make_mlp(), types.SimpleNamespace(by=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    model.register_forward_hook(lambda _, x, y: y * (1 + scale.by))
    for one in range(4):
        scale.by = yield from run_pass(life, 5 * one + 5, model, optimizer)


@named("meter.count")
def mean_that_a_second_function_hands_on(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for one in range(4):
        count = yield from run_two(life, 5 * one + 5, model, optimizer)
        optimizer.param_groups[0]["lr"] = count / 50


def run_two(life: Life, until: int, model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    count = yield from run_pass(life, until, model, optimizer)
    return count


_losses: list[float] = []


class OfClass(Level):
    total = 0

    @classmethod
    def update(cls, value: float) -> None:  # type: ignore[override]
        cls.total += 1


class ByType(Level):
    total = 0

    def update(self, value: float) -> None:
        type(self).total += 1


class Pushes(Level):
    def update(self, value: float) -> None:
        self.count += 1
        _losses.append(value)


class Draws(Level):
    @torch.no_grad()
    def update(self, value: float) -> None:
        self.count += 1
        torch.rand(self.count)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp()

    def forward(self, x: Tensor) -> Any:
        count = len(_losses) + len(Kept.all) + mark.total  # type: ignore[attr-defined]
        return self.net(x) * (1 + count + OfClass.total + ByType.total)


def of_method(make: type[Level]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        _losses.clear()
        Kept.all.clear()
        OfClass.total = ByType.total = mark.total = 0  # type: ignore[attr-defined]
        model, level = Reads(), make()
        optimizer = adam(model)
        life.register(model=model, optimizer=optimizer)
        for _ in life.steps():
            loss = model(draw(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            level.update(loss.item())
            yield loss

    return body


NAMED |= {
    f"method_of_{one.__name__}_reaches_further": (of_method(one), what)
    for one, what in (
        (OfClass, "OfClass.total"),
        (ByType, "ByType.total"),
        (Pushes, "level.count"),
        (Draws, "level.count"),
        (OfOther, "level.count"),
        (ByFunction, "level.count"),
        (OfFunction, "level.count"),
    )
}


def of_mean(use: Callable[[Any, int], object]) -> Loop:
    def body(life: Life) -> Iterator[Tensor]:
        model, meter = make_mlp(), Meter()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        life.register(model=model, optimizer=optimizer)
        report = functools.partial(use, optimizer)
        for _ in life.steps():
            loss = model(draw(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.add(loss.item())
            report(meter.count)
            yield loss

    return body


def set_rate(optimizer: Any, count: int) -> bool:
    optimizer.param_groups[0]["lr"] = count / 50
    return True


NAMED["count_that_is_reported_to_the_rate"] = (of_mean(set_rate), "meter.count")


@named("meter.count")
def count_that_a_print_hands_on(life: Life) -> Iterator[Tensor]:
    model, meter = make_mlp(), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    life.register(model=model, optimizer=optimizer)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.add(loss.item())
        print(set_rate(optimizer, meter.count))
        if set_rate(optimizer, meter.count):
            pass
        yield loss


@named("meter.count")
def count_that_a_closure_has_later(life: Life) -> Iterator[Tensor]:
    model, meter, scale = make_mlp(), Meter(), 1
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    model.register_forward_hook(lambda _, x, y: y * scale)
    for _ in life.steps():
        loss = model(draw(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.add(loss.item())
        scale = 1 + meter.count
        yield loss

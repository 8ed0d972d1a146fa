"""Loops of public reports whose state is outside of what `state_dict()` has.

Those of `KEPT` are equal after two kills. Those of `NAMED` cannot be: perdure names, before the
first checkpoint, what it does not keep.
"""

import argparse
import copy
import dataclasses
import enum
import functools
import itertools
import random
import time
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

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

    def __call__(self, out: Tensor, wanted: Tensor) -> float:
        self.hits["all"] += int((out.argmax(1) == wanted).sum())
        self.total += len(wanted)
        return self.hits["all"] / self.total

    def reset(self) -> None:
        self.hits, self.total = {"all": 0}, 0


@kept
def meters_and_timers_that_only_count(life: Life) -> Iterator[Tensor]:
    model = make_mlp()
    optimizer = adam(model)
    life.register(model=model, optimizer=optimizer)
    losses, norms, whole, passes, accuracy = Meter(), Meter(), Timer(), Timer(), Accuracy()
    progress = Progress(losses, norms)
    with whole:
        for step in life.steps():
            with passes:
                out = model(draw(8, 16))
            loss = out.square().mean()
            hits = accuracy(out, out.detach().argmin(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.add(loss.item())
            spent = whole.tick()
            if step % 5 == 4:
                progress.display(step)
                accuracy.reset()
                print(hits, spent)
            yield loss

"""What members could not have in common is refused by name, before the first update."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import Tensor, nn

import perdure.elastic
from perdure.model.errors import ConfigError
from perdure.worker.elastic import open_pipeline_trainer, open_trainer
from perdure.worker.elastic.state.blocks import StagedReplica
from perdure.worker.elastic.state.replicated import BufferGuard, Replica, ReplicatedState
from perdure.worker.pipeline.stage import Pass, _take_gradients

pytestmark = pytest.mark.torch


class Book(nn.Module):
    """Alters its buffer in a way of its own; `by` is called with itself, and the input's mean."""

    def __init__(
        self, by: Callable[["Book", Tensor], object], *, persistent: bool, size: int = 1
    ) -> None:
        super().__init__()
        self.linear, self.by, self.passes = nn.Linear(1, 1), by, itertools.count()
        self.register_buffer("mean", torch.zeros(size), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.by(self, x.mean().detach())
        return self.linear(x - self.mean.mean())


def train(model: nn.Module, steps: int = 8, parameters: Any = None, **more: Any) -> list[int]:
    """Train `model` alone, and return the steps that were committed."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)

    def compute(step: int, number: int) -> Tensor:
        return model(torch.full((2, 1), step + number + 1.0)).sum()

    trainer = open_trainer(model, optimizer, compute, micro_batches=2, **more)
    return [step.step for step in trainer.steps(steps)]


def train_stages(*blocks: nn.Module, steps: int = 8, recompute: bool = False) -> list[int]:
    """Train `blocks` as a pipeline of one stage, alone."""

    def load(step: int, number: int) -> tuple[Tensor, Tensor]:
        return torch.full((2, 1), step + number + 1.0), torch.zeros(2, 1)

    trainer = open_pipeline_trainer(
        blocks,
        lambda ps: torch.optim.SGD(ps, lr=0.001),
        load,
        nn.functional.mse_loss,
        stages=1,
        micro_batches=2,
        recompute=recompute,
    )
    return [step.step for step in trainer.steps(steps)]


def move(book: Book, mean: Tensor) -> Tensor:
    return 0.9 * book.mean + 0.1 * mean


def assign(book: Book, mean: Tensor) -> None:
    book.mean = move(book, mean)


def assign_later(book: Book, mean: Tensor) -> None:
    if next(book.passes) > 10:
        book.mean.data.copy_(move(book, mean))


ALTERED: dict[str, Callable[[Book, Tensor], object]] = {
    "in place": lambda book, mean: book.mean.copy_(move(book, mean)),
    "by .data": lambda book, mean: book.mean.data.copy_(move(book, mean)),
    "assigned": assign,
    "later": assign_later,
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("by", ALTERED.values(), ids=ALTERED)
def test_a_buffer_that_a_pass_alters_is_named(by: Any, persistent: bool) -> None:
    model = Book(by, persistent=persistent)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match="alters the buffer mean"):
        train(model)
    same = all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert same == (by is not assign_later), "it is refused before the first update"


def test_a_large_buffer_is_compared_in_the_first_steps() -> None:
    model = Book(ALTERED["by .data"], persistent=True, size=1 << 20)
    with pytest.raises(ConfigError, match="alters the buffer mean"):
        train(model)


def fill(book: Book, mean: Tensor) -> None:
    book.mean = mean.view(1)


def grow(book: Book, mean: Tensor) -> None:
    if len(book.mean) < mean:
        book.mean = torch.zeros(int(mean))


@pytest.mark.parametrize("run", [train, train_stages])
@pytest.mark.parametrize("by", [fill, grow])
def test_a_buffer_that_follows_from_the_input_alone_does_no_harm(by: Any, run: Any) -> None:
    assert run(Book(by, persistent=False)) == list(range(8))


def test_a_buffer_that_is_state_by_its_first_value_is_named() -> None:
    """It keeps the largest of all inputs: a pass of the last one leaves it as it is."""

    def keep(book: Book, mean: Tensor) -> None:
        book.mean.copy_(torch.maximum(book.mean, 100 - mean))

    for run in (train, train_stages):
        with pytest.raises(ConfigError, match=r"alters the buffer [\d.]*mean"):
            run(Book(keep, persistent=False))


def test_a_buffer_that_the_script_alters_between_two_steps_is_not_the_pass_s_doing() -> None:
    model = Book(lambda book, mean: None, persistent=True)
    guard = BufferGuard(model)
    for step in range(3):
        model.mean.fill_(step)
        guard.note()
        guard.check()


def renormalize(model: "Altering", x: Tensor) -> Tensor:
    return model.table(x.long().flatten() % 3)


def clamp(model: "Altering", x: Tensor) -> Tensor:
    model.linear.weight.data.clamp_(-0.01, 0.01)
    return model.linear(x)


def follow(model: "Altering", x: Tensor) -> Tensor:
    """facebookresearch/moco: a key encoder that follows the query's in each pass."""
    model.key.weight.data = 0.9 * model.key.weight.data + 0.1 * model.linear.weight.data
    return model.linear(x) - model.key(x).detach()


class Altering(nn.Module):
    def __init__(self, by: Callable[["Altering", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.by = nn.Linear(1, 1), by
        self.key = nn.Linear(1, 1).requires_grad_(False)
        self.table = nn.Embedding(3, 1, max_norm=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.by(self, x)


@pytest.mark.parametrize(
    ("by", "name"), [(renormalize, "table"), (clamp, "linear"), (follow, "key")]
)
def test_a_parameter_that_a_pass_alters_is_named(by: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"alters the parameter {name}.weight"):
        train(Altering(by))


def test_a_parameter_that_gets_another_place_in_memory_is_not_altered() -> None:
    def move_over(model: Altering, x: Tensor) -> Tensor:
        model.linear.weight.data = model.linear.weight.data.clone()
        return model.linear(x)

    assert train(Altering(move_over)) == list(range(8))


def test_what_an_update_alters_in_place_of_a_step_under_way_is_not_the_pass_s_doing() -> None:
    """The member's world broke in a step, and it rolled forward by what others had reduced."""

    def count(model: nn.Module) -> None:
        model.mean.add_(1.0)

    model = Book(lambda book, mean: None, persistent=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Replica(model, optimizer, after_update=count)
    compute = lambda step, number: model(torch.ones(2, 1)).sum()  # noqa: E731
    state = ReplicatedState(replica, compute, count=1, seed=0, exact=False)
    state.applied = 0
    state.begin_step()
    state.update("sent")
    state.begin_step()
    state.check_step()


def test_gradients_that_an_update_alters_are_not_sent_to_who_is_behind() -> None:
    """`foreach` adds Nesterov's momentum to gradients in place, as GPUs do by default."""
    for foreach in (False, True):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=foreach
        )
        state = ReplicatedState(
            Replica(model, optimizer), lambda step, number: torch.zeros(()), count=1, seed=0,
            exact=False,
        )  # fmt: skip
        state.applied = 0
        for flat in state.work.buckets.flats(0):
            flat.fill_(1.0)
        before = [flat.clone() for flat in state.work.buckets.flats(0)]
        state.update("reduced")
        after = state.work.buckets.flats(0)
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert state.stand().holds == same == (not foreach)


@pytest.mark.parametrize("exact", [False, True])
def test_a_pass_that_drops_gradients_is_named(exact: bool) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compute(step: int, number: int) -> Tensor:
        optimizer.zero_grad()
        return model(torch.ones(2, 1)).sum()

    trainer = open_trainer(model, optimizer, compute, micro_batches=2, exact=exact)
    if exact:  # Each micro-batch's gradients are kept apart.
        assert [step.step for step in trainer.steps(2)] == [0, 1]
        return
    with pytest.raises(ConfigError, match="micro-batch 1 of step 0 drops the gradients"):
        list(trainer.steps(2))


@pytest.mark.parametrize("exact", [False, True])
def test_a_sparse_gradient_is_named(exact: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 1, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.long() % 3)

    with pytest.raises(ConfigError, match=r"gradient of table\.weight is sparse"):
        train(Words(), exact=exact)


def test_a_sparse_gradient_of_a_stage_is_refused() -> None:
    table = nn.Embedding(3, 1, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="block 4 makes a sparse gradient"):
        _take_gradients([table.weight], 4, Pass(0, 0))


def test_a_parameter_of_no_model_is_refused() -> None:
    loose, model = nn.Parameter(torch.zeros(2)), nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"steps a parameter of shape \[2\]"):
        train(model, parameters=[*model.parameters(), loose])


def test_a_stage_s_optimizer_may_step_parameters_of_the_model_alone() -> None:
    blocks, loose = [nn.Linear(1, 1), nn.Linear(1, 1)], nn.Parameter(torch.zeros(2))
    StagedReplica(blocks, lambda _: torch.optim.SGD(nn.Sequential(*blocks).parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"steps a parameter of shape \[2\]"):
        StagedReplica(blocks, lambda ps: torch.optim.SGD([*ps, loose], lr=0.1))


def test_a_parameter_that_is_unfrozen_within_a_step_is_named() -> None:
    class Opening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.first.requires_grad_()
            return self.last(self.first(x))

    with pytest.raises(ConfigError, match=r"first\.\w+ got a gradient in a step that began"):
        train(Opening())


def test_a_stage_does_not_freeze_or_unfreeze() -> None:
    blocks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    replica = StagedReplica(blocks, lambda ps: torch.optim.SGD(ps, lr=0.1))
    blocks[1].bias.requires_grad_(False)
    (changed,) = [
        name for p, (name, trained) in replica.trained_first.items() if p.requires_grad != trained
    ]
    assert changed == "1.bias"


def test_what_comes_after_an_update_is_made_by_who_rolls_forward_or_follows() -> None:
    def clip(model: nn.Module) -> None:
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)

    model = nn.Linear(3, 2)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), after_update=clip)
    for clipped in (False, True):
        model.weight.data.fill_(1.0)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        replica.update(clipped=clipped)
        assert model.weight.abs().max() <= 0.01


class Kept(nn.Module):
    """Has plain attributes; `by` is called with itself, and the input's mean."""

    def __init__(self, by: Callable[["Kept", float], object]) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(1, 1), by
        self.heat, self.rows, self.newest = 1.0, [0.0], None
        self.table, self.generator = np.zeros(1), np.random.default_rng(1)
        self.inner, self.slotted = Inner(), Slotted()
        self.calls, self.seen, self.average, self.means = 0, 0.0, 0.0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.by(self, float(x.mean()))
        newest = 0.0 if self.newest is None else self.newest
        drawn = self.generator.random() if self.by is draw else 0.0
        rest = sum(self.rows) + self.table[0] + self.inner.mean + self.slotted.mean + drawn
        return self.linear(x) * self.heat + rest + newest


class Inner:
    mean = 0.0


class Slotted:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 0.0


def draw(book: Kept, mean: float) -> None:
    """Use the generator in the pass."""


def keep_tensor(book: Kept, mean: float) -> None:
    old = torch.zeros(1) if book.newest is None else book.newest
    book.newest = 0.9 * old + mean


PLAIN: dict[str, Callable[[Kept, float], object]] = {
    "heat": lambda book, mean: setattr(book, "heat", book.heat * 0.9),
    "rows": lambda book, mean: book.rows.append(mean),
    "table": lambda book, mean: np.add(book.table, mean, out=book.table),
    "inner.mean": lambda book, mean: setattr(book.inner, "mean", book.inner.mean + mean),
    "slotted.mean": lambda book, mean: setattr(book.slotted, "mean", book.slotted.mean + mean),
    "newest": keep_tensor,
    "generator": draw,
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_attribute_that_a_pass_alters_and_needs_is_named(name: str) -> None:
    model = Kept(PLAIN[name])
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=f"alters the attribute {name}"):
        train(model)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def count(book: Kept, mean: float) -> None:
    book.calls += 1


COUNTED: dict[str, Callable[[Kept, float], object]] = {
    "calls": count,
    "seen": lambda book, mean: setattr(book, "seen", time.monotonic()),
    "means": lambda book, mean: book.means.append(mean),
    "average": lambda book, mean: setattr(book, "average", 0.9 * book.average + mean),
}


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_a_number_that_nothing_depends_on_is_named_and_trains_on(
    name: str, stages: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Kept(COUNTED[name])
    if stages:
        assert train_stages(model) == list(range(8))
    else:
        assert train(model) == list(range(8))
    said = capfd.readouterr().err
    assert said.count(f"{name} in common: passes alter it") == 1
    assert len(model.means) + model.calls in (0, 16), "it is what the passes of the steps made it"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_a_stage_names_a_plain_attribute_that_a_pass_alters_and_needs(
    name: str, recompute: bool
) -> None:
    with pytest.raises(ConfigError, match=rf"alters the attribute [\w. ]*{name}"):
        train_stages(Kept(PLAIN[name]), recompute=recompute)


def test_a_number_that_a_later_pass_depends_on_is_named_when_it_does() -> None:
    def warm_up(book: Kept, mean: float) -> None:
        book.calls += 1
        if book.calls > 5:
            book.heat = 0.5

    with pytest.raises(ConfigError, match="alters the attribute heat or calls"):
        train(Kept(warm_up))


def test_steps_without_a_pass_here_are_not_the_first_ones() -> None:
    """Where there are fewer micro-batches than members, one may pass nothing for a while."""
    model = Kept(PLAIN["heat"])
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = ReplicatedState(
        replica, lambda step, number: model(torch.ones(2, 1)).mean(), count=1, seed=0, exact=False
    )
    for _ in range(6):
        state.begin_step()
        state.check_step()
        replica.guard.forget()
    state.begin_step()
    state.work.recompute(0, 0)
    state.work.done.append(0)
    with pytest.raises(ConfigError, match="alters the attribute heat"):
        state.check_step()


def test_an_attribute_that_a_pass_only_notes_does_no_harm() -> None:
    def note(book: Kept, mean: float) -> None:
        book.noted = torch.tensor(mean)
        book.shape = (1, mean)

    assert train(Kept(note)) == list(range(8))


def test_an_optimizer_within_the_optimizer_is_named() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.base = torch.optim.Adam([p for g in self.param_groups for p in g["params"]])

    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"Outer\.base is an optimizer"):
        Replica(model, Outer(model.parameters()))


def test_a_hook_on_accumulated_gradients_is_named() -> None:
    model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
    with pytest.raises(ConfigError, match="weight has a hook on its accumulated gradient"):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Rows:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.full((1,), float(self.rng.random())), torch.ones(1)


class Plain:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.full((1,), float(number)), torch.ones(1)


class Centred:
    """facebookresearch/vissl#436: the loss keeps a mean of its inputs."""

    mean = 0.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(output.detach().mean())
        return (output - target - self.mean).square().mean()


class Averaged:
    """horovod/horovod#2285: averaged weights that `on_step` keeps."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def __call__(self, step: Any) -> None:
        self.weights[f"step {step.step}"] = torch.ones(1)


def train_whole(**more: Any) -> None:
    given: dict[str, Any] = {"loss": nn.functional.mse_loss, "dataset": Plain()} | more
    perdure.elastic.train(
        blocks=nn.Linear(1, 1), optimizer=lambda ps: torch.optim.Adam(ps, lr=0.1),
        global_batch=4, micro_batch=2, steps=4, **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"dataset": Rows()}, "dataset.rng"),
        ({"loss": Centred()}, "loss.mean"),
        ({"on_step": Averaged()}, "on_step.weights"),
    ],
)
def test_what_functions_keep_and_members_do_not_share_is_named(
    more: dict[str, Any], what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    train_whole(**more)
    assert f"members do not have {what} in common" in capfd.readouterr().err


def test_functions_that_keep_nothing_are_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    shown: list[float] = []
    train_whole(on_step=lambda step: print(step.step, len(shown)))
    assert "in common" not in capfd.readouterr().err

"""A random module tree, optimizer, and flags survive a save and a load, bit for bit."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from perdure.model.events import AnyEvent, CheckpointFailed, CheckpointRestored
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer

pytestmark = pytest.mark.torch
WIDTH = 6


class Stateful(nn.Module):
    """State of all kinds that a module may have."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)
        self.register_buffer("first", None)
        self.rate, self.passes, self.newest = 1.0, 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean[-2 * WIDTH :], x.detach()[0]])
        self.first = x.detach()[0] if self.first is None else self.first
        self.newest = x.mean(0)
        self.rate, self.passes = self.rate * 0.9, self.passes + 1
        return x * self.rate + self.mean.mean() - self.first

    def get_extra_state(self) -> int:
        return self.passes * 7

    def set_extra_state(self, state: int) -> None:
        assert state % 7 == 0


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bare": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "stateful": lambda: Stateful(persistent=True),
    "transient": lambda: Stateful(persistent=False),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}
Tree = st.recursive(
    st.sampled_from(sorted(LAYERS)), lambda inner: st.lists(inner, max_size=3), max_leaves=7
)


def make_module(tree: Any) -> nn.Module:
    return LAYERS[tree]() if isinstance(tree, str) else nn.Sequential(*map(make_module, tree))


class World:
    """A model and what trains it; each life has a fresh one."""

    def __init__(self, tree: Any, kind: str, groups: int, url: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make_module(tree))
        parts = [list(self.model.parameters())[n::groups] for n in range(groups)]
        self.optimizer = OPTIMIZERS[kind]([{"params": part} for part in parts if part])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.events: list[AnyEvent] = []
        self.saver = Checkpointer(
            url=url, config=CheckpointConfig(), rank=0, world_size=1, generation=0,
            emit=self.events.append, now=lambda: 0.0,
        )  # fmt: skip
        for name in ("model", "optimizer", "schedule"):
            self.saver.register(name, getattr(self, name))
        self.saver.check()

    def step(self, *, update: bool) -> str:
        self.saver.begin_step()
        loss = self.model(torch.randn(5, WIDTH)).square().mean()
        if loss.requires_grad:
            loss.backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return float(loss.detach()).hex()

    def flip(self, chosen: list[bool]) -> None:
        """Freeze the chosen parameters, and put every other chosen module into evaluation."""
        for parameter, flag in zip(self.model.parameters(), chosen, strict=False):
            parameter.requires_grad_(not flag)
        for module, flag in zip(self.model.modules(), reversed(chosen), strict=False):
            module.training = not flag


def read_all(world: World) -> dict[str, Any]:
    """Return all that is compared, by name."""
    model = world.model
    found: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        if not isinstance(module, Stateful):
            continue
        kept = {k: v for k, v in vars(module).items() if isinstance(v, float | int | Tensor)}
        found |= {f"{path}:{name}": value for name, value in kept.items()}
    for number, state in world.optimizer.state_dict()["state"].items():
        found |= {f"state {number}.{name}": value for name, value in state.items()}
    for n, p in enumerate(model.parameters()):
        found |= {f"grad {n}": p.grad, f"flag {n}": p.requires_grad}
    return found | {"groups": [{k: v for k, v in g.items() if k != "params"}
                               for g in world.optimizer.param_groups]}  # fmt: skip


@settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip
@given(
    tree=Tree,
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    groups=st.integers(1, 3),
    flags=st.lists(st.booleans(), max_size=12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    accumulates=st.booleans(),
)
def test_all_state_survives_a_save_and_a_load(
    tree: Any, kind: str, groups: int, flags: list[bool], dtype: torch.dtype, accumulates: bool
) -> None:
    with tempfile.TemporaryDirectory() as url:
        torch.set_default_dtype(dtype)
        try:
            one = World(tree, kind, groups, url)
            assert one.saver.restore({}) == 0
            one.step(update=True)
            one.flip(flags)
            one.step(update=True)
            one.step(update=not accumulates)
            one.saver.save(3, reason="test", extra={})
            one.saver.settle()
            expected = {name: _copy(value) for name, value in read_all(one).items()}
            losses = [one.step(update=True) for _ in range(2)]
            one.saver.close()
            assert not [e for e in one.events if isinstance(e, CheckpointFailed)]
            other = World(tree, kind, groups, url)
            assert other.saver.restore({}) == 3
            (restored,) = other.events
            assert isinstance(restored, CheckpointRestored)
            assert restored.why_not_exact == ""
            found = read_all(other)
            assert found.keys() == expected.keys()
            unlike = [name for name in expected if not _is_same(expected[name], found[name])]
            assert unlike == []
            assert [other.step(update=True) for _ in range(2)] == losses
            other.saver.close()
        finally:
            torch.set_default_dtype(torch.float32)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(
            one.view(-1).view(torch.uint8) if one.is_contiguous() else one,
            other.detach().view(-1).view(torch.uint8) if other.is_contiguous() else other,
        )  # fmt: skip
    return bool(one == other)

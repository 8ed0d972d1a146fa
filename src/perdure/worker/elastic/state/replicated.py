"""The replicated state: parameters, optimizer, schedule, the same bytes on every member."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from perdure.model.errors import ConfigError
from perdure.plan.elastic.commit import MemberProgress, Reformation, decide_reformation
from perdure.plan.elastic.shards import Snapshot
from perdure.plan.elastic.stage_commit import Holder, Move
from perdure.worker.elastic.gradients import BUCKET_BYTES, Accumulation, Buckets, Compute
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving import (
    check_sendable,
    find_device,
    move_blocks,
    open_state,
    pack_state,
)
from perdure.worker.elastic.snapshots import Snapshots
from perdure.worker.elastic.state import At, Followed, Source, Taken


class Replica:
    """A model with its optimizer and schedule. The only place that alters them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float = 0.0,
    ) -> None:
        """Update `model` by `optimizer`; gradients are clipped to `clip_norm` if that is not 0.

        `scaler` is a GradScaler. It looks at reduced gradients, which are the same everywhere: a
        step that it skips is skipped, and so committed, by all.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler, self._clip_norm = scaler, clip_norm
        self.device = find_device(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if scaler is not None:  # Who follows or rolls forward may not have scaled a loss yet.
            scaler.scale(self.parameters[0].new_zeros(1))
        self.guard = BufferGuard(model)

    def update(self, *, clipped: bool = False) -> None:
        """Apply the gradients that the parameters have now.

        `clipped` says that they are, and are unscaled: another member has applied them before.
        """
        if self.scaler is not None:
            self._unscale(done=clipped)
        if self._clip_norm and not clipped:
            nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def scale(self, loss: Tensor) -> Tensor:
        """Return what backward is to begin with."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _unscale(self, *, done: bool) -> None:
        """Unscale, and find out whether the step is to be skipped."""
        kept = self.scaler.state_dict()
        if done:
            self.scaler.load_state_dict(kept | {"scale": 1.0})
        self.scaler.unscale_(self.optimizer)
        if done:
            self.scaler.load_state_dict(kept)

    def parts(self) -> dict[str, Any]:
        """Return the objects that have the state, by name."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state(self) -> dict[str, Any]:
        """Return all of it; tensors are not copied."""
        return {name: part.state_dict() for name, part in self.parts().items()}

    @property
    def nbytes(self) -> int:
        """Return about what its state has, with the two moments of Adam."""
        return 3 * sum(p.nbytes for p in self.model.parameters())

    def load(self, state: dict[str, Any]) -> None:
        """Become `state`."""
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self._load_types(state["optimizer"]["state"])
        self.guard = BufferGuard(self.model)

    def _load_types(self, state: dict[int, dict[str, Any]]) -> None:
        """Give moments the type that they had: torch casts them to the parameter's."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, entries in state.items():
            mine = self.optimizer.state[parameters[number]]
            for key, value in entries.items():
                if isinstance(value, Tensor) and mine[key].dtype != value.dtype:
                    mine[key] = value.to(mine[key].device, copy=True)


class BufferGuard:
    """Sees whether a model's forward pass alters its buffers, as BatchNorm's does."""

    def __init__(self, model: nn.Module) -> None:
        """Watch from now on."""
        self._model = model
        self._versions: list[int] | None = [b._version for b in model.buffers()]

    def check(self) -> None:
        """Refuse the model, if it does; the first pass shows it.

        Raises:
            ConfigError: such a state would depend on which rank computed which micro-batch.
        """
        versions, self._versions = self._versions, None
        if versions is None:
            return
        for (name, buffer), version in zip(self._model.named_buffers(), versions, strict=True):
            if buffer._version != version:
                raise ConfigError(
                    f"elastic: the forward pass alters the buffer {name}, which ranks would then "
                    "not have in common",
                    hint="use GroupNorm or LayerNorm, or track_running_stats=False",
                )


def make_model(blocks: Any) -> nn.Module:
    """Return `blocks` as one model: a module, or a list of them that is called in order."""
    return blocks if isinstance(blocks, nn.Module) else nn.Sequential(*blocks)


class ReplicatedState(Followed):
    """A state that everyone has whole: what one member has reduced is what all have.

    A newcomer follows all members.
    """

    work: Accumulation
    whole = True
    node = ""

    def __init__(
        self,
        replica: Replica,
        compute: Compute,
        *,
        count: int,
        seed: int,
        exact: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Train `replica` with `count` micro-batches a step, each once, by `compute`."""
        self.replica = replica
        self.snapshots = Snapshots(None, -1, Snapshot, every=0)
        rider = 0 if exact else 2 * count
        self._count = count
        buckets = Buckets(replica.parameters, bucket_bytes, rider=rider)
        self.work = Accumulation(
            compute,
            self._backward,
            buckets,
            count=count,
            seed=seed,
            exact=exact,
            whole=True,
        )
        self._holds = False
        """The buffers of the step before have its reduced gradients."""

    # --- a step -------------------------------------------------------------------------------

    def _backward(self, loss: Tensor, counts: bool) -> None:
        self.replica.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.replica.guard.check()

    def update(self, source: Source) -> None:
        """Apply the gradients that the buffers of this step have."""
        self.work.buckets.expose(self.applied)
        self.replica.update(clipped=source == "sent")
        self.applied += 1
        self._holds = source != "followed"
        self.work.clear()

    # --- the world ----------------------------------------------------------------------------

    def prepare(self, *, joins: bool) -> None:
        """Do once what a join does with a state: the first time takes a tenth of a second.

        Raises:
            ConfigError: an entry of the state could not be sent to others.
        """
        check_sendable(self.replica.state())
        if joins:
            skeleton, tensors = pack_state(self.replica.state())
            state, empty = open_state(skeleton)
            for target, tensor in zip(empty, tensors, strict=True):
                target.copy_(tensor)
            self.replica.load(state)

    def stand(self) -> MemberProgress:
        """Return how far this member is."""
        return MemberProgress(self.applied, tuple(self.work.done), self._holds)

    def decide(self, progress: Mapping[int, MemberProgress], line: int) -> Reformation:
        """Return how all come to one step."""
        return decide_reformation(self._count, progress)

    def list_reduced(self, step: int) -> list[Tensor]:
        """Return the reduced gradients, and the sums with them."""
        apart = [] if self.work.tally.rides else [self.work.tally.sums(step)]
        return [*self.work.buckets.flats(step), *apart]

    def take(self, plan: Reformation, group: Group, settings: dict[str, Any]) -> Taken:
        """Receive the whole state, where this member has none, or give a share of it."""
        donors = tuple(Holder(donor) for donor in plan.donors)
        moves = [Move(0, rank, donors) for rank in plan.fresh]
        found = move_blocks(group, moves, lambda holder, block: self.replica.state())
        if not found:
            self.applied = plan.step
            return Taken()
        self.replica.load(found[0])
        self.applied, self._holds = plan.step, False
        self.work.clear()
        return Taken({}, changed=True)

    def enter(
        self, plan: Reformation, group: Group, progress: Mapping[int, MemberProgress], line: int
    ) -> None:
        """Compute what nobody has."""
        self.line = self.ready = line
        kept = {m: donor for donor in plan.donors for m in progress[donor].done}
        self.work.enter(plan.todo, kept, group.me, (group.me,))

    # --- what outlives a loss -----------------------------------------------------------------

    def part(self, group: Group) -> tuple[bool, int, int]:
        """Return that the first member saves it all."""
        return group.index == 0, 0, 1

    def list_saved(self) -> dict[str, Any]:
        """Return the objects that have the state."""
        return self.replica.parts()

    # --- what a newcomer follows --------------------------------------------------------------

    def choose_donors(self, answers: Mapping[int, At], ahead: Sequence[int]) -> tuple[int, ...]:
        """Return all of them."""
        return tuple(answers)

    def become(self, state: Any, step: int, line: int) -> None:
        """Become `state`."""
        self.replica.load(state)
        self.applied = step

    def list_sent(self) -> list[Tensor]:
        """Return the buffers of the gradients of the step under way."""
        return self.work.buckets.flats(self.applied)

"""What an elastic rank trains: the one loop (`trainer`) over a state of one of three kinds.

A *replicated* state is whole on every member, a *sharded* one has each member's rows of everything,
a *staged* one each member's blocks. A kind says how a step is computed and reduced, what goes to
whom so that the state is whole in the next world, what is saved, and what a newcomer follows.
When any of it happens is the loop's to say.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import torch
import xxhash
from torch import Tensor

from perdure.model.errors import ConfigError, PlatformError
from perdure.plan.elastic.commit import FRESH, NO_LINE, Reformation
from perdure.plan.elastic.shards import ShardReformation
from perdure.plan.elastic.stage_commit import StageReformation
from perdure.worker.checkpoint.attributes import load_attributes
from perdure.worker.checkpoint.registry import Registry
from perdure.worker.elastic.comparing import hash_state
from perdure.worker.elastic.gradients import Work
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving import check_sendable, map_tensors
from perdure.worker.elastic.snapshots import Snapshots

Source = Literal["reduced", "sent", "followed"]
"""Where the gradients of an update come from: reduced here with the others; sent by a member that
has applied, and so clipped, them before; or sent to a rank that follows the members."""


Plan = Reformation | ShardReformation | StageReformation
"""What the members of a new world do before they go on: the same on every one of them."""


class At(msgspec.Struct, frozen=True, tag=True):
    """The donor's steps applied by now."""

    step: int
    node: str = ""
    runs: tuple[tuple[int, int], ...] = ()
    """Where the model is cut into stages: its runs of blocks, each the first and the one behind."""
    late: bool = False
    """In the answer to `Take`: the donor has passed the step."""
    busy: bool = False
    """In the answer to `Take`: the donor has to send another copy of its state first."""


class Lost(Exception):
    """The members cannot be followed any further this time."""


class Taken(NamedTuple):
    """A member's state, as it became in a new world."""

    plain: dict[str, Any] | None = None
    """What all have alike, where this member's state is of another step or history than it was."""
    changed: bool = False
    """Whoever follows this member has something else now."""


class State(Protocol):
    """One member's state, and its part of the step under way."""

    replica: Any
    """A model with its optimizer and schedule, or this member's part of them."""
    whole: bool = False
    """Every member has all of it."""
    applied: int = FRESH
    """Steps that it contains; `FRESH` where nobody has said yet what it is."""
    line: int = NO_LINE
    """The epoch in which the last of them was reduced: tells a step that was taken twice apart."""
    ready: int = NO_LINE
    """The epoch in which the step under way was reduced, where it was."""
    work: Work
    """How a step is computed and reduced."""
    snapshots: Snapshots[Any]
    groups: tuple[Group, ...] = ()
    """The groups that it has within the world, beside that of all members."""

    @property
    def followed(self) -> "Followed | None":
        """Return what a newcomer follows; None where it gets its state within the join."""
        return None

    def start_at(self, step: int) -> None:
        """Note that this is the state after `step` steps, as a checkpoint had it."""
        self.applied = step

    def begin_step(self) -> None:
        """Be ready for the passes of a step."""

    def wants_rerun(self) -> bool:
        """Return whether all members are to pass a micro-batch again, which they do together."""
        return False

    def check_step(self) -> None:
        """Refuse a model whose members would differ after the step that was reduced.

        Raises:
            ConfigError: it is such a model.
        """

    def update(self, source: Source) -> None:
        """Apply the reduced gradients: the state contains one step more, and nothing of the next.

        What the world before had is given up: all have reduced a step in this one. It contains no
        collective and cannot be interrupted.
        """

    # --- the world ----------------------------------------------------------------------------

    def prepare(self, *, joins: bool) -> None:
        """Do once what would cost others time if it were done later for the first time.

        Who looks for the remains of a world need not look at all of torch.
        """
        gc.collect()
        gc.freeze()

    def stand(self) -> Any:
        """Return how far this member is, for all to decide from."""

    def decide(self, progress: Mapping[int, Any], line: int) -> Plan:
        """Return how the members go on, in an epoch of that `line`.

        Raises:
            PlatformError: nothing whole is left.
        """

    def list_reduced(self, step: int) -> list[Tensor]:
        """Return what a member that is behind lacks to apply `step`."""

    def take(self, plan: Any, group: Group, settings: dict[str, Any]) -> Taken:
        """Give others what they lack, and have what the plan gives to this member.

        `settings` are this member's, for those who take them over.

        Raises:
            Broken: a member was lost.
        """

    def enter(self, plan: Any, group: Group, progress: Mapping[int, Any], line: int) -> None:
        """Be a member of the world, with what is left to do of the step under way.

        Raises:
            Broken: a member was lost.
        """

    def leave(self) -> None:
        """Forget what an attempt at a step has not finished: its world is left."""
        self.work.drop_unfinished()

    def describe(self, plan: Any) -> dict[str, Any]:
        """Return what else there is to be said of a new world (fields of `WorldReformed`)."""
        return {}

    def list_units(self) -> dict[str, Any]:
        """Return what this member has, by unit: every member that has a unit has the same of it."""

    # --- what outlives a loss -----------------------------------------------------------------

    def part(self, group: Group) -> tuple[bool, int, int]:
        """Return whether this member saves its part, the part's number, and how many there are."""

    def list_saved(self) -> dict[str, Any]:
        """Return what a checkpoint on disk has, by name."""

    def make_registry(self, number: int, count: int) -> Registry | None:
        """Return what saves part `number` of `count`; None where that is torch's format."""
        return None

    def snapshot(self, settings: dict[str, Any]) -> tuple[Any, Any]:
        """Return what this member's part is called now, and all of it, with `settings`.

        Where everyone has the whole state, nobody takes one.
        """
        return None, None


class Followed(State, Protocol):
    """A state that a newcomer can follow while the members train: it makes the same updates."""

    node: str

    @property
    def followed(self) -> "Followed":
        """Return the state that a rank has followed."""
        return self

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return the blocks that this member has, where it has not all of them."""
        return ()

    def choose_donors(self, answers: Mapping[int, At], ahead: Sequence[int]) -> tuple[int, ...]:
        """Return whom to follow of those who have answered; `ahead` have chosen before.

        Raises:
            Lost: this time nobody.
        """

    def become(self, state: Any, step: int, line: int) -> None:
        """Become `state`, that of `step`, as the donors have it in the epoch `line`."""

    def list_sent(self) -> list[Tensor]:
        """Return what the coming update is made of."""

    def hash_settings(self) -> str:
        """Return a hash of all else that an update depends on, and of the attributes.

        `on_step` may have changed an attribute, which whoever follows does not hear of.
        """
        groups = read_settings(self.replica.optimizer, None)["groups"]
        found = repr(groups), hash_state(self.replica.list_attributes())
        return xxhash.xxh3_64(repr(found).encode()).hexdigest()


class PartState(State):
    """A state of which each member has a part, and had another one in the world before."""

    part_name = ""
    """What a part is called."""

    def __init__(self, snapshots: Snapshots[Any]) -> None:
        """Have `snapshots` keep this member's part."""
        self.snapshots = snapshots
        self._old: dict[Any, Any] = {}
        """Parts of the world before, of the same step."""
        self._sendable = False
        """What other members would be sent was opened."""
        self._rebuilt = False
        """The model is another one than in the world before."""

    def start_at(self, step: int) -> None:
        """Note that this is the state after `step` steps, and nothing of another one is held."""
        super().start_at(step)
        self._old.clear()

    def begin_step(self) -> None:
        """Note the buffers, which a pass may not alter; the first time, open what would be sent.

        Raises:
            ConfigError: the script has frozen or unfrozen a parameter, or an entry of the state
                cannot be sent.
        """
        if not self._sendable:
            check_sendable(self.list_units())
            self._sendable = True
        self.replica.guard.note()
        for parameter, (name, trained) in self.replica.trained_first.items():
            if parameter.requires_grad != trained:
                raise ConfigError(
                    f"elastic: requires_grad of {name} was changed, and a {self.part_name} trains "
                    "what it did at first",
                    hint="freeze or unfreeze before training, or train it replicated",
                )

    def check_step(self) -> None:
        """Refuse a model that alters its buffers, or a loss that uses parameters that are away.

        Raises:
            ConfigError: it is such a one.
        """
        self.check_passes()
        mine = set(self.work.buckets.params)
        for parameter, (name, _) in self.replica.trained_first.items():
            if parameter.grad is not None and parameter not in mine:
                raise ConfigError(
                    f"elastic: {name} of the script's model got a gradient, and is empty here: "
                    f"this rank trains a {self.part_name}",
                    hint="have blocks compute what the loss needs of their parameters, or train "
                    "the model replicated",
                )

    def check_passes(self) -> None:
        """Refuse a model that alters its buffers, or attributes that its passes need."""

    def update(self, source: Source) -> None:
        """Apply the gradients of this member's part."""
        self.work.buckets.expose(self.applied)
        self.replica.guard.forget()
        self.work.seed_update(self.applied, self.replica.held)
        self.replica.update()
        self.applied += 1
        self.line, self.ready = self.ready, NO_LINE
        self._old.clear()
        self.work.clear()
        if self._rebuilt:
            self._rebuilt = False
            gc.collect()  # The model of the world before refers to itself, and to its parts.

    def list_reduced(self, step: int) -> list[Tensor]:
        """Return the sums: gradients of its own part each member has."""
        return [self.work.tally.sums(step)]

    def describe(self, plan: Any) -> dict[str, Any]:
        """Return how far all went back."""
        return {"back": plan.back}

    def decide(self, progress: Mapping[int, Any], line: int) -> Plan:
        """Return from which step on the members go on, and who has which part.

        Raises:
            PlatformError: nothing whole is left.
        """
        plan = self.make_plan(progress, line)
        if plan is None:
            raise PlatformError(
                f"the last copy of a {self.part_name} is lost, and no snapshot is whole",
                hint="the world starts again from the newest checkpoint",
            )
        return plan

    def make_plan(self, progress: Mapping[int, Any], line: int) -> Plan | None:
        """Return what `decide` does; None where nothing whole is left."""


def read_settings(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return the rates and such of an optimizer, and the state of its schedule."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    more = {"scheduler": scheduler.state_dict()} if scheduler is not None else {}
    return {"groups": groups, **more}


def name_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules by names that begin with "model"."""
    return {f"model.{path}".rstrip("."): module for path, module in model.named_modules()}


def read_flags(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return which modules evaluate."""
    return {"evaluating": [p for p, module in name_modules(model).items() if not module.training]}


def load_plain(model: torch.nn.Module, plain: Mapping[str, Any]) -> None:
    """Take over attributes of modules, and which of them evaluate, where these are told.

    Tensors are copied: those of a snapshot lie in memory that a later one takes.
    """
    modules = name_modules(model)
    load_attributes(modules, map_tensors(plain.get("attributes", {}), Tensor.clone))
    for path, module in modules.items() if "evaluating" in plain else ():
        module.training = path not in plain["evaluating"]


def load_settings(
    optimizer: torch.optim.Optimizer, scheduler: Any, settings: Mapping[str, Any]
) -> None:
    """Take over what `read_settings` returned, where it is there.

    Whose it was may have had other parameters, and so other groups of them (`match_groups`): then
    only what a schedule changes is taken over. A schedule's lists, a value for each group, follow.
    """
    groups, saved = optimizer.param_groups, settings.get("groups", ())
    chosen, same = match_groups(groups, saved), len(saved) == len(groups)
    for group, number in zip(groups, chosen, strict=False):
        taken = saved[number].items()
        group.update({key: value for key, value in taken if same or key in _SCHEDULED})
    if scheduler is not None and "scheduler" in settings:
        state = dict(settings["scheduler"])
        if not same:
            for key, value in state.items():
                if isinstance(value, list) and len(value) == len(saved):
                    state[key] = [value[number] for number in chosen]
        scheduler.load_state_dict(state)


def match_groups(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return for each of an optimizer's groups the number of the saved one that it takes over.

    By their `name`, where all have one; as many as there were, by their places. Else a part of the
    model lacks the parameters of some group (a stage without norms): each takes the first of those
    that are most like it in what no schedule changes, such as the weight decay. None are saved by a
    part that has not begun; then there is nothing to take.
    """
    if not saved:
        return []
    names = [group.get("name") for group in saved]
    if all(group.get("name") in names for group in groups) and None not in names:
        return [names.index(group["name"]) for group in groups]
    if len(groups) == len(saved):
        return list(range(len(saved)))

    def likeness(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
        kept = one.keys() & other.keys() - _SCHEDULED
        return sum(one[key] == other[key] for key in kept)

    return [
        max(range(len(saved)), key=lambda number: (likeness(group, saved[number]), -number))
        for group in groups
    ]


_SCHEDULED = {"params", "lr", "initial_lr", "momentum", "betas"}
"""What differs between two groups that a schedule has moved, or is no setting."""

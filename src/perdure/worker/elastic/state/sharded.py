"""The sharded state: each member has its rows of every parameter.

What differs from a replicated one:

- Members of a copy run their micro-batches side by side, because each gathers from all. Where the
  gathering breaks in mid-backward, what that pass has added is taken back.
- A new world has other shards, and so another model (`Skeleton`).

`ShardedReplica` is what `Replica` is to a replicated state, for a member that has one shard of it.

Parameters are torch's DTensors, and so are the optimizer's moments. Everything else (learning
rates, counts of steps, the schedule, buffers) is small and the same on every member: the *plain*
part. An update may not communicate, or a loss in the middle of it would leave shards of different
steps: gradients are clipped before they are cut, and the optimizer has to work element by element.

The model is sharded by torch's own `fully_shard`, built anew for each world. An FSDP2 module
belongs to its process group: in a new world it raises, and it cannot be sharded twice. So the model
is kept as a skeleton, whose parameters have shapes and no data, and for each world a copy of it is
sharded and given its shards. `fully_shard` gathers parameters before they are used and frees them
afterwards. Gradients it never sees: they are taken from the gathered parameters as soon as they are
there, and accumulate, whole, in stand-ins, one for each parameter. From there on they are what
replicated ones are: finished micro-batches survive the loss of anyone, copies are reduced, and what
was partly reduced is made again. It costs memory for a whole set of gradients, which sharding would
otherwise cut too.

All members of a copy gather together, so they run as many micro-batches: who has fewer runs one
whose gradients are dropped.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor, _redistribute, debug
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._collective_utils import MeshTopoInfo

from perdure.model.errors import ConfigError
from perdure.plan.elastic.commit import FRESH, NO_LINE
from perdure.plan.elastic.shards import (
    WHOLE,
    Shard,
    ShardProgress,
    ShardReformation,
    Snapshot,
    Source,
    decide_shards,
)
from perdure.worker.checkpoint.attributes import note_attributes, read_common
from perdure.worker.elastic.comparing import NAMED, hash_attributes
from perdure.worker.elastic.gradients import BUCKET_BYTES, Accumulation, Buckets, Compute
from perdure.worker.elastic.group import Group, ShardGroup
from perdure.worker.elastic.membership import read_node_name
from perdure.worker.elastic.moving import PARAMETER, Parts, find_device, move_rows, share_plain
from perdure.worker.elastic.snapshots import Snapshots
from perdure.worker.elastic.state import (
    PartState,
    Taken,
    load_plain,
    load_settings,
    name_modules,
    read_flags,
    read_settings,
)
from perdure.worker.elastic.state.blocks import refuse_views
from perdure.worker.elastic.state.replicated import (
    OWN,
    AfterUpdate,
    BufferGuard,
    describe_groups,
    drop_harmless,
    list_buffers,
    list_trained,
    refuse_loose,
    refuse_regrouped,
    run_after_update,
)


class Skeleton:
    """A model without data: what a sharded one is made from."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Keep `model`'s structure and buffers; `options` go to `fully_shard`.

        Raises:
            ConfigError: a parameter has no rows, or two modules share it.
        """
        first: dict[Tensor, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                raise ConfigError(
                    f"elastic: {first[parameter]} and {name} are one parameter, which shards "
                    "cannot share",
                    hint="train it replicated, cut it into stages (pipeline=), or untie it",
                )
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        for name, shape in self.shapes.items():
            if not shape:
                raise ConfigError(
                    f"elastic: the parameter {name} has no dimension to be cut along",
                    hint="give it the shape (1,), or train it replicated",
                )
        self._marks = {name: dict(vars(p)) for name, p in model.named_parameters()}
        """Attributes that the script has given to parameters, such as that weights do not decay."""
        self.lengths = sorted({shape[0] for shape in self.shapes.values()})
        self.device = find_device(model)
        self._options = dict(options)
        self._template = _strip(model)
        self._names = (f"world{number}" for number in itertools.count(1))
        """Torch takes two meshes of a size for the same one, otherwise."""

    def stand_ins(self) -> dict[str, Tensor]:
        """Return, for each trainable parameter, a tensor of its shape that takes no memory."""
        return {
            name: torch.empty(1, dtype=p.dtype, device=self.device).expand(p.shape).requires_grad_()
            for name, p in self._template.named_parameters()
            if p.requires_grad
        }

    def build(
        self,
        group: ShardGroup,
        shard: Shard,
        parts: Parts,
        buffers: Mapping[str, Tensor],
        take: Callable[[str, Tensor], object],
    ) -> nn.Module:
        """Return the model, sharded over `group`, with the rows of `shard` that `parts` have.

        `take` is called with each parameter's name and gathered form when its gradient is there.
        """
        model = copy.deepcopy(self._template)
        names = {(id(m), key): name for m, key, name in _list_places(model)}
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        mesh = init_device_mesh(
            self.device.type, (shard.count,), mesh_dim_names=(next(self._names),)
        )
        units = [*list_units(model), model]
        for unit in units:
            fully_shard(unit, mesh=mesh, **self._options)
        state = {
            name: cut_along(parts[name][PARAMETER], mesh, shape)
            for name, shape in self.shapes.items()
        }
        model.load_state_dict(state, strict=False, assign=True)
        for name, parameter in model.named_parameters():
            parameter.__dict__.update(self._marks[name])
        for unit in units:
            assert isinstance(unit, FSDPModule)
            unit.set_custom_all_gather(_AllGather(group))
            unit.register_forward_pre_hook(_Watch(_places_of(unit), names, take))
        return model


class _AllGather(AllGather):
    """Gathers over a copy's group, where an order to leave it is heard."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather, and wait for it.

        Raises:
            Broken: a member was lost.
        """
        self._group.all_gather(output_tensor, input_tensor)
        self._group.wait()


class _Watch:
    """A unit's parameters are gathered: see to it that their gradients are taken."""

    def __init__(
        self,
        places: list[tuple[nn.Module, str]],
        names: Mapping[tuple[int, str], str],
        take: Callable[[str, Tensor], object],
    ) -> None:
        self._places = [(module, key, names[id(module), key]) for module, key in places]
        self._take = take
        self._known: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        for owner, key, name in self._places:
            parameter = getattr(owner, key)
            if self._known.get(name) is not parameter and parameter.requires_grad:
                self._known[name] = parameter
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(_take_over, self._take, name)
                )


def _take_over(take: Callable[[str, Tensor], object], name: str, parameter: Tensor) -> None:
    take(name, parameter)
    parameter.grad = None


def list_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are gathered one by one: a sequence's, or those of a module list.

    Raises:
        ConfigError: none is found, so that all of the model would be gathered at once.
    """
    lists = [model] if isinstance(model, nn.Sequential) else model.children()
    units = [
        child
        for one in lists
        if isinstance(one, nn.Sequential | nn.ModuleList)
        for child in one
        if any(True for _ in child.parameters())
    ]
    if not units:
        raise ConfigError(
            f"elastic: no blocks are found in {type(model).__name__}",
            hint="give a list of blocks, or keep them in an nn.ModuleList",
        )
    return units


def _strip(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose parameters have no data; buffers are copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _list_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, attribute, name) of every parameter."""
    for path, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            yield module, key, f"{path}.{key}" if path else key


def _places_of(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the parameters are that are gathered with `unit`, and not with one inside it."""
    places = [(unit, key) for key, _ in unit.named_parameters(recurse=False)]
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            places += _places_of(child)
    return places


def cut_along(value: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """Return `value`, this member's rows of a tensor of that `shape`, as one that `mesh` has."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, mesh, [ShardPlacement(0)], run_check=False, shape=shape, stride=stride
    )


def clear_sharding_caches() -> None:
    """Clear what torch remembers of the meshes that tensors were sharded over.

    The names differ by version: `_clear_sharding_prop_cache` is there from 2.11 on, and
    `clear_redistribute_planner_cache`, with the planner that it is for, from 2.10 on.
    """
    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        clear = getattr(debug, "_clear_fast_path_sharding_prop_cache", lambda: None)
    clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for cached in (MeshTopoInfo.build_from_mesh, _redistribute._gen_transform_infos):
        cached.cache_clear()


class ShardedReplica:
    """A model of which this member has a shard, with its optimizer and schedule."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        *,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float = 0.0,
        options: dict[str, Any] | None = None,
        after_update: AfterUpdate | None = None,
    ) -> None:
        """Shard `model`, once `adopt` says how; `options` go to `fully_shard`."""
        refuse_views([model])
        _refuse_hooks(model)
        self.skeleton = Skeleton(model, options or {})
        self._script = read_numbers(model)
        """Of the script's model, of which shards train a copy."""
        named: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._groups = describe_groups(optimizer(list(named)), named)
        self._born: dict[str, Any] = {}
        self.trained_first = self._trained_initially = list_trained(model)
        """Of the script's model, and of the newest world's."""
        self.device = self.skeleton.device
        self.stand_ins = self.skeleton.stand_ins()
        self.parameters = list(self.stand_ins.values())
        self._model: nn.Module | None = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.shard: Shard | None = None
        self.begun: Callable[[], object] = lambda: None
        """Hears that the first world's optimizer is there, as it was given."""
        self._initial: nn.Module | None = model
        self._given = model
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self._clip_norm, self._after_update = clip_norm, after_update
        self._sharded: dict[str, Any] = {}
        """The parameters, DTensors of the newest world."""
        self.guard = BufferGuard(model)
        self._updated = False
        self._counts = True
        """The pass under way counts: its gradients are taken."""
        self._before: dict[str, Tensor | None] = {}
        """Gradients as they were before the pass under way."""
        self.on_gradient: Callable[[Tensor], object] = lambda parameter: None
        """Hears of each stand-in whose gradient of a pass is there."""

    @property
    def model(self) -> nn.Module:
        """Return the model of the newest world."""
        assert self._model is not None
        return self._model

    # --- the state ----------------------------------------------------------------------------

    @property
    def held(self) -> object:
        """Return the rows that this member has."""
        return self.shard

    def parts(self) -> Parts:
        """Return this member's rows of everything; tensors are not copied.

        Before the first world, the whole initial model.
        """
        if self._initial is not None:
            return {name: {PARAMETER: p.detach()} for name, p in self._initial.named_parameters()}
        parts: Parts = {}
        for name, parameter in self._sharded.items():
            parts[name] = {PARAMETER: _local(parameter)}
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    parts[name][key] = _local(value)
        return parts

    def plain(self, kinds: tuple[type, ...] = (float,)) -> dict[str, Any]:
        """Return what every member has alike, all attributes of `kinds`, and which rows it has."""
        model = self._initial
        if model is None:
            self.follow_script()
            model = self.model
        plain: dict[str, Any] = {
            "buffers": {name: b.detach().cpu() for name, b in model.named_buffers()},
            "keys": {
                name: {key: value.dtype for key, value in entries.items()}
                for name, entries in self.parts().items()
            },
        }
        attributes = read_common(name_modules(model), self._born, kinds)
        plain["attributes"] = drop_harmless(attributes, self.guard.harmless)
        plain |= read_flags(model)
        if self._initial is None:
            plain |= read_settings(self.optimizer, self.scheduler)
            plain["scalars"] = {
                name: {
                    key: value
                    for key, value in self.optimizer.state.get(parameter, {}).items()
                    if not isinstance(value, DTensor)
                }
                for name, parameter in self._sharded.items()
            }
        return plain

    def adopt(
        self,
        group: ShardGroup,
        shard: Shard,
        parts: Parts,
        plain: dict[str, Any],
        *,
        kept: bool = False,
    ) -> None:
        """Become `parts`, the rows of `shard`, sharded over `group`. Nothing here communicates.

        If `kept`, the script's model is of this step already.
        """
        device = self.skeleton.device
        placed = {
            name: {key: value.to(device) for key, value in entries.items()}
            for name, entries in parts.items()
        }
        self._model = self.skeleton.build(group, shard, placed, plain["buffers"], self._take)
        self._born = note_attributes(name_modules(self.model))
        load_plain(self.model, plain)
        if not kept:  # What the script made of later steps is undone.
            load_plain(self._given, plain)
            now, known = read_numbers(self.model), read_numbers(self._given)
            load_numbers(self._given, {key: now[key] for key in known if key in now})
            self._script = read_numbers(self._given)
        self._sharded = dict(self.model.named_parameters())
        self.trained_first = self._trained_initially | list_trained(self.model)
        self.optimizer = self._make_optimizer(list(self._sharded.values()))
        names = {p: name for name, p in self._sharded.items()}
        refuse_loose(self.optimizer, names)
        refuse_regrouped(self._groups, describe_groups(self.optimizer, names))
        self.scheduler = self._make_scheduler(self.optimizer) if self._make_scheduler else None
        for name, parameter in self._sharded.items():
            state = dict(plain.get("scalars", {}).get(name, {}))
            for key, value in placed[name].items():
                if key != PARAMETER:
                    state[key] = cut_along(value, parameter.device_mesh, self.skeleton.shapes[name])
            if state:
                self.optimizer.state[parameter] = {
                    key: value.clone() if not isinstance(value, DTensor | float | int) else value
                    for key, value in state.items()
                }
        load_settings(self.optimizer, self.scheduler, plain)
        if "groups" not in plain:
            self.begun()
        self.shard = shard
        if self._initial is not None:  # It is freed: nobody is to be sent of it any more.
            for initial in self._initial.parameters():
                initial.data = initial.data.new_empty(0)
        self._initial = None
        self._updated = False
        harmless = self.guard.harmless
        self.guard = BufferGuard(self.model)
        self.guard.harmless |= harmless

    def release(self) -> None:
        """Free what a broken pass has left gathered, and what torch remembers of the mesh.

        Its caches would keep the mesh, and with it the descriptors of its process group.
        """
        clear_sharding_caches()
        if isinstance(self._model, FSDPModule):
            with contextlib.suppress(Exception):  # Whatever state it is in: it is not used again.
                self._model.reset_iter_state()

    # --- a step -------------------------------------------------------------------------------

    def follow_script(self) -> None:
        """Give the model that trains what the script has changed in the one that it gave."""
        numbers = read_numbers(self._given)
        changed = {k: value for k, value in numbers.items() if self._script.get(k) != value}
        load_numbers(self.model, changed)
        self._script = numbers

    def backward(self, loss: Tensor, counts: bool) -> None:
        """Add a pass's gradients to those of the stand-ins, if it `counts`.

        Where the gathering breaks in the middle, what the pass has added is taken back.
        """
        self._counts = counts
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            for name, gradient in self._before.items():
                self.stand_ins[name].grad = gradient
            raise
        finally:
            self._before.clear()

    def _take(self, name: str, parameter: Tensor) -> None:
        """A gathered parameter's gradient of this pass is there."""
        if not self._counts:
            return
        stand_in, gradient = self.stand_ins[name], parameter.grad
        assert gradient is not None
        gradient = gradient.to(stand_in.dtype)
        self._before.setdefault(name, stand_in.grad)
        stand_in.grad = gradient if stand_in.grad is None else stand_in.grad + gradient
        self.on_gradient(stand_in)

    def update(self) -> None:
        """Apply the gradients that the stand-ins have, whole: this member's rows of them.

        Raises:
            ConfigError: the optimizer communicates.
        """
        assert self.shard is not None
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
        for name, stand_in in self.stand_ins.items():
            gradient, parameter = stand_in.grad, self._sharded[name]
            if gradient is None:
                continue
            rows = self.shard.rows(len(gradient))
            mine = gradient[rows.start : rows.stop]
            parameter.grad = cut_along(mine, parameter.device_mesh, self.skeleton.shapes[name])
        if self._updated:
            self.optimizer.step()
        else:
            self._update_watched()
        if self.scheduler is not None:
            self.scheduler.step()
        for parameter in self._sharded.values():
            parameter.grad = None
        run_after_update(self._after_update, self.model)

    def _update_watched(self) -> None:
        """Do the first update of a world, and see that it does not communicate."""
        with debug.CommDebugMode() as watch:  # type: ignore[no-untyped-call]
            self.optimizer.step()
        if watch.get_total_counts():
            raise ConfigError(
                f"elastic: {type(self.optimizer).__name__} communicates to update sharded "
                "parameters, which a loss could interrupt half-way",
                hint="use one that works element by element, such as AdamW or SGD, or no shard=",
            )
        self._updated = True


def read_numbers(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the plain numbers, words, and flags of modules, by module and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def load_numbers(model: nn.Module, numbers: Mapping[tuple[str, str], Any]) -> None:
    """Take over what `read_numbers` returned."""
    for (path, name), value in numbers.items():
        setattr(model.get_submodule(path), name, value)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse a hook on a gradient: what is gathered for a pass has none.

    Raises:
        ConfigError: a parameter has one.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise ConfigError(
                f"elastic: {name} has a hook on its gradient, which a shard would not have",
                hint="scale what the model computes, or train it replicated",
            )


def _local(value: Tensor) -> Tensor:
    assert isinstance(value, DTensor)
    return value._local_tensor.detach()


class ShardedState(PartState):
    """One member's shard, of a copy of the state that some members have together."""

    work: Accumulation
    part_name = "shard"

    def __init__(
        self,
        replica: ShardedReplica,
        compute: Compute,
        *,
        me: int,
        count: int,
        seed: int,
        minimum: int,
        exact: bool = False,
        snapshot_every: int = 0,
        memory: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Train `replica`, of which `minimum` members have a copy (0: all of them).

        Every `snapshot_every` steps (0: never) a snapshot goes to the folder `memory`.
        """
        self.replica = replica
        super().__init__(Snapshots(memory, me, Snapshot, every=snapshot_every))
        self._me, self._count, self._minimum = me, count, minimum
        names = {p: name for name, p in replica.stand_ins.items()}
        buckets = Buckets(replica.parameters, bucket_bytes, sets=1, names=names)
        self.work = Accumulation(
            compute,
            self._backward,
            buckets,
            count=count,
            seed=seed,
            exact=exact,
            whole=False,
        )
        replica.on_gradient = buckets.note
        self._saves = False
        """This member is of the first copy."""

    # --- a step -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin with what the script has made of the model since the step before."""
        self.replica.follow_script()
        super().begin_step()

    def wants_rerun(self) -> bool:
        """Return whether passes here have altered attributes: members gather from each other."""
        return self.replica.guard.has_altered()

    def check_passes(self) -> None:
        """Pass a micro-batch again beside the other members, if any of them wants it."""
        guard, model, rerun = self.replica.guard, self.replica.model, None
        if self.work.tally.read(self.applied).votes[2] > 0:
            number = self.work.done[-1] if self.work.done else 0
            rerun = functools.partial(self.work.recompute, self.applied, number)
        guard.check(rerun, together=True)
        if rerun is not None and isinstance(model, FSDPModule):
            model.reshard()  # A pass without a backward leaves the outermost gathered.

    def _backward(self, loss: Tensor, counts: bool) -> None:
        self.replica.backward(loss, counts)

    # --- the world ----------------------------------------------------------------------------

    def stand(self) -> ShardProgress:
        """Return what this member holds."""
        mine = self.replica.shard
        held = [*(shard for shard in self._old if shard != mine), *([mine] if mine else [])]
        return ShardProgress(
            node=read_node_name(),
            applied=self.applied,
            line=self.line,
            shards=() if self.applied == FRESH else tuple(held),
            done=tuple(self.work.done),
            ready=self.ready,
            snapshots=self.snapshots.list_all(),
        )

    def make_plan(
        self, progress: Mapping[int, ShardProgress], line: int
    ) -> ShardReformation | None:
        """Return from which step on, and who has which shard."""
        return decide_shards(self._count, self.replica.skeleton.lengths, self._minimum, progress)

    def take(self, plan: ShardReformation, group: Group, settings: dict[str, Any]) -> Taken:
        """Become the shard that the plan gives to this member, at the plan's step."""
        me, replica = self._me, self.replica
        at_step = (self.applied, self.line) == (plan.step, plan.line)
        held: dict[Shard, Parts] = dict(self._old) if at_step else {}
        mine: dict[str, Any] = {}
        if at_step and replica.shard is not None:
            held[replica.shard] = replica.parts()
            own = replica.plain()  # Another member's script may not have seen the newest step yet.
            mine = {key: own[key] for key in ("attributes", "evaluating")}
        elif plan.fresh and me == min(plan.layout):
            held[WHOLE] = replica.parts()
        read_snapshot = self.snapshots.make_reader()

        def open_one(source: Source) -> Any:
            return read_snapshot(Snapshot(plan.step, plan.line, source.shard, source.owner))

        def read(source: Source) -> Parts:
            return held[source.shard] if source.owner < 0 else open_one(source)["parts"]

        def tell() -> dict[str, Any]:
            return replica.plain() | settings if teller.owner < 0 else open_one(teller)["plain"]

        teller = min(
            plan.sources,
            key=lambda s: (s.owner >= 0, s.member),
            default=Source(min(plan.layout), WHOLE),
        )
        plain = share_plain(group, teller.member, tell)
        parts = move_rows(group, plan, replica.skeleton.shapes, plain["keys"], read)
        beside = next(copy for copy in plan.copies if me in copy)
        copy = group.open(ShardGroup, f"copy/{beside[0]}", beside)
        self.groups = (copy,)
        replica.adopt(copy, plan.layout[me], parts, plain | mine, kept=bool(mine))
        self._rebuilt = True
        self._old = held
        self.ready = NO_LINE
        if at_step:
            return Taken()
        self.applied, self.line = plan.step, plan.line
        self.work.clear()
        return Taken(plain, changed=True)

    def enter(
        self,
        plan: ShardReformation,
        group: Group,
        progress: Mapping[int, ShardProgress],
        line: int,
    ) -> None:
        """Compute what nobody has."""
        at_step = {
            m: s for m, s in progress.items() if (s.applied, s.line) == (plan.step, plan.line)
        }
        kept = {number: m for m, s in at_step.items() for number in s.done}
        self.work.enter(plan.todo, kept, self._me, self.groups[0].members)
        self._saves = self._me in plan.copies[0]

    def leave(self) -> None:
        """Keep whole micro-batches, and free what is gathered."""
        super().leave()
        self.replica.release()

    def list_units(self) -> dict[str, Any]:
        """Return this member's rows, what all members have alike, and what may differ."""
        replica = self.replica
        assert replica.shard is not None
        rows = f"rows {replica.shard.number} of {replica.shard.count}"
        plain = replica.plain(OWN)
        kept = {place.name for place in list_buffers(replica.model) if not place.transient}
        plain["buffers"] = {n: b for n, b in plain["buffers"].items() if n in kept}
        named = plain.pop("attributes")
        return {rows: {rows: replica.parts()}, "settings": plain, NAMED: hash_attributes(named)}

    # --- what outlives a loss -----------------------------------------------------------------

    def part(self, group: Group) -> tuple[bool, int, int]:
        """Return that the first copy saves its shards."""
        shard = self.replica.shard
        assert shard is not None
        return self._saves, shard.number, shard.count

    def list_saved(self) -> dict[str, Any]:
        """Return the objects that have the shard."""
        replica = self.replica
        saved = {"model": replica.model, "optimizer": replica.optimizer}
        return saved | ({"scheduler": replica.scheduler} if replica.scheduler is not None else {})

    def snapshot(self, settings: dict[str, Any]) -> tuple[Snapshot, Any]:
        """Return the shard, and what all members have alike."""
        replica = self.replica
        assert replica.shard is not None
        named = Snapshot(self.applied, self.line, replica.shard, self._me)
        return named, {"parts": replica.parts(), "plain": replica.plain() | settings}

"""The lines for a loop of the script's own.

They are proposed as a diff if the loop is `for NAME in range(N)`. For other loops they are listed
with the lines of the script where they belong. What else the loop needs is found as it runs:
perdure names what changes and is in no checkpoint before it writes the first one.
"""

import ast
from collections.abc import Iterable

from perdure.cli.adopting.edits import Change, Edits, UnsureError
from perdure.cli.adopting.places import (
    check_once,
    find_last_import,
    insert_import,
    list_bound,
    list_visible,
    loop_of,
    owner_in,
)
from perdure.cli.adopting.script import Reading, Role, find_range
from perdure.worker.carried import is_computed, is_only_shown, list_carried, target_names, walk_body

Loop = ast.For | ast.While
_SEEDS = ("manual_seed", "set_seed", "seed_everything", "manual_seed_all")
_ROLES: tuple[Role, ...] = ("model", "optimizer", "scheduler", "scaler")
_BATCHES = (
    "for step, batch in run.batches(dataset, batch_size=..., steps=...) replaces the loop over the "
    "DataLoader; a run then resumes in the middle of an epoch"
)


def propose_loop(reading: Reading) -> Change:
    """Return the lines for the one loop that trains.

    Raises:
        UnsureError: there is none, or its lines depend on what the text does not show.
    """
    chains = reading.find_training_loops()
    if len(chains) != 1:
        objects = reading.find_object_loops()
        if not chains and objects:
            raise UnsureError(
                f"the optimizer of the loop in line {objects[0].lineno} belongs to an object",
                *list_lines(reading, objects[0]),
            )
        found = f"{len(chains)} training loops" if chains else "no training loop"
        raise UnsureError(
            f"{found} found: a loop with backward() and a step of an optimizer",
            *list_lines(reading, chains[0][0] if chains else None),
        )
    loop, inner = chains[0][0], chains[0][-1]
    lines = list_lines(reading, loop)
    try:
        over = _check_range(reading, chains[0])
        check_once(reading, loop)
        _check_loop(reading, loop)
        words = ", ".join(f"{name}={name}" for name in _choose_registered(reading, loop))
    except UnsureError as unsure:
        raise UnsureError(unsure.why, *unsure.by_hand, *lines) from None
    assert isinstance(loop, ast.For)
    return _write_loop(reading, loop, inner, over, words)


def list_lines(reading: Reading, loop: Loop | None) -> tuple[str, ...]:
    """Return perdure's five lines, each with the place where it belongs."""
    last = find_last_import(reading)
    at, above, of = (
        (f"line {loop.lineno}", f"above line {loop.lineno}", f"in the loop of line {loop.lineno}")
        if loop is not None
        else ("the loop", "above the loop", "in the loop")
    )
    names = [name for role in _ROLES for name in reading.names(role)]
    registered = ", ".join(f"{n}={n}" for n in dict.fromkeys(names)) or "model=..., optimizer=..."
    return (
        f"below line {last}: import perdure" if last else "on top: import perdure",
        f"{above}: run = perdure.init()",
        f"{above}: run.register({registered})",
        f"{at}: for step in run.steps(N):   # N counts all steps; it begins at the right one",
        f"{of}: run.log(loss=loss.item())",
    )


def _check_range(reading: Reading, chain: list[Loop]) -> ast.Call:
    """Return the `range(N)` of the outermost loop.

    Raises:
        UnsureError: it has none that counts all steps from 0.
    """
    loop, over = chain[0], find_range(chain[0])
    if isinstance(loop, ast.While):
        raise UnsureError(f"the `while` in line {loop.lineno} does not say how many steps come")
    if over is None or len(chain) > 2:
        raise UnsureError(f"line {loop.lineno} is not `for NAME in range(N):`", _BATCHES)
    first = over.args[0]
    is_from_zero = len(over.args) == 1 or (isinstance(first, ast.Constant) and first.value == 0)
    if len(over.args) > 2 or over.keywords or not is_from_zero:
        raise UnsureError(
            f"the loop in line {loop.lineno} does not count from 0, so it seems to resume by itself"
        )
    if any(isinstance(node, ast.Sub) for node in ast.walk(over)):
        raise UnsureError(
            f"the loop in line {loop.lineno} counts what is left, so it seems to resume by itself"
        )
    if not isinstance(loop.target, ast.Name) or loop.orelse:
        raise UnsureError(f"line {loop.lineno} is not `for NAME in range(N):`")
    return over


def _check_loop(reading: Reading, loop: Loop) -> None:
    """Refuse a loop that ends early, reads on in data, or resumes by itself.

    Raises:
        UnsureError: it is one.
    """
    for node in walk_body(loop):
        line = getattr(node, "lineno", loop.lineno)
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Await) or (
            isinstance(node, ast.Break) and loop_of(reading, node) is loop
        ):
            raise UnsureError(
                f"line {line} leaves the loop before its end",
                "all ranks have to leave it at the same step",
            )
        if isinstance(node, ast.Call):
            name = reading.name_of(node.func)
            if name in ("next", "anext") or name.endswith("__next__"):
                raise UnsureError(
                    f"line {line} reads on in data, and no checkpoint has the place in it", _BATCHES
                )
    for call in reading.methods("load_state_dict"):
        if owner_in(call, reading.names("optimizer")):
            raise UnsureError(
                f"line {call.lineno} loads an optimizer, so the script resumes by itself",
                "delete your own loading of checkpoints: perdure restores what is registered",
            )


def _choose_registered(reading: Reading, loop: Loop) -> list[str]:
    """Return the names of all that a checkpoint of this loop has to hold.

    Raises:
        UnsureError: one is missing, or may be None.
    """
    names = [name for role in _ROLES for name in reading.names(role)]
    used = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    visible, wrapped = list_visible(reading, loop), _list_wrapped(reading)
    chosen = [
        name for name in dict.fromkeys(names) if name in visible and (name in used or (
            "model" in reading.roles[name] and name not in wrapped))
    ]  # fmt: skip
    chosen = [name for name in chosen if not wrapped.get(name, set()) & set(chosen) - {name}]
    for role in ("model", "optimizer"):
        if not any(role in reading.roles[name] for name in chosen):
            raise UnsureError(f"no {role} was found where line {loop.lineno} is")
    for name, value in reading.list_assignments():
        if name in chosen and isinstance(value, ast.Constant):
            raise UnsureError(
                f"`{name}` may be {value.value!r} (line {value.lineno})",
                f"run.register({name}={name}) only if there is one",
            )
    return chosen


def _list_wrapped(reading: Reading) -> dict[str, set[str]]:
    """Return model -> names that hold it within DDP or what torch.compile made of it."""
    found: dict[str, set[str]] = {}
    for target, value in reading.list_assignments():
        if (name := reading.wraps(value)) and name != target:
            found.setdefault(name, set()).add(target)
    return found


def _write_loop(
    reading: Reading, loop: ast.For, inner: Loop, over: ast.Call, registered: str
) -> Change:
    run = "run"
    if run in list_bound(reading.tree) | set(reading.imports) or "*" in reading.imports:
        run = "perdure_run"
    edits = Edits(reading.text)
    insert_import(reading, edits, "import perdure")
    edits.insert_above(loop, f"{run} = perdure.init()")
    edits.insert_above(loop, f"{run}.register({registered})")
    edits.replace(over, f"{run}.steps({reading.segment(over.args[-1])})")
    by_hand = []
    loss = _find_loss(reading, loop)
    statement = _find_shown_loss(reading, loop, loss) if loss and inner is loop else None
    if statement is not None:
        edits.insert_above(statement, f"{run}.log(loss={loss}.item())")
    elif loss and inner is not loop and _is_bound_in(inner.body, loss):
        edits.insert_below(inner, f"{run}.log(loss={loss}.item())")
        by_hand.append(
            f"the line below line {inner.end_lineno} logs the loss of an epoch's last batch; a "
            "mean says more"
        )
    else:
        by_hand.append(f"{run}.log(loss=...) in the loop shows the loss in perdure watch")
    if inner is not loop:
        by_hand.append(
            f"a step is an epoch here (line {loop.lineno}). A failure costs up to one epoch, and so"
            " does a preemption with a shorter notice. A stop waits for the epoch's end. For a "
            f"step a batch: {_BATCHES}"
        )
    if not any(call.func.attr in _SEEDS for call in reading.calls
               if isinstance(call.func, ast.Attribute)):  # fmt: skip
        by_hand.append(
            "nothing is seeded, so a restart draws other numbers before the loop; put "
            "torch.manual_seed(1) on top"
        )
    by_hand += _list_unkept(reading, loop, run)
    if lines := reading.describe().saves:
        by_hand.append(f"what line {lines[0]} saves is not needed to resume; it may stay")
    return Change(edits.apply(), by_hand=tuple(by_hand))


def _list_unkept(reading: Reading, loop: Loop, run: str) -> list[str]:
    """Return what to do about names that one step hands to the next, and about unknown objects."""
    found = []
    for call in [*reading.methods("step", loop), *reading.methods("update", loop)]:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        name = owner.id if isinstance(owner, ast.Name) else ""
        opaque = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
        if name and (opaque or "ema" in name.lower()) and not reading.roles.get(name):
            found.append(
                f"line {call.lineno}: {run}.register({name}={name}), if it has a state_dict()"
            )
    names = [name for name in list_carried(loop) if not reading.roles.get(name, set()) & {*_ROLES}]
    for name in (n for n in names if is_computed(loop, n) or not is_only_shown(loop, n)):
        found.append(
            f"`{name}` would be reset after a restart; if that matters, keep it with the "
            "checkpoint:\n"
            "    class Kept:\n"
            f"        {name} = ...  # its first value\n"
            "        def state_dict(self): return dict(vars(self))\n"
            "        def load_state_dict(self, state): vars(self).update(state)\n"
            "    kept = Kept()\n"
            f"    {run}.register(kept=kept)  # and kept.{name} in place of {name}"
        )
    return found


def _find_loss(reading: Reading, loop: Loop) -> str:
    """Return what the loss is called; empty if several are, or none has a name."""
    names = set()
    for call in reading.methods("backward", loop):
        assert isinstance(call.func, ast.Attribute)
        backed = call.func.value
        if isinstance(backed, ast.Call) and len(backed.args) == 1:  # scaler.scale(loss)
            backed = backed.args[0]
        names.add(backed.id if isinstance(backed, ast.Name) and not call.args else "")
    return names.pop() if len(names) == 1 else ""


def _find_shown_loss(reading: Reading, loop: Loop, loss: str) -> ast.stmt | None:
    """Return the first statement that reads the loss off the device.

    To log it there costs no further wait.
    """
    for call in reading.methods("item", loop):
        if owner_in(call, (loss,)):
            for above in reading.ancestors(call):
                if isinstance(above, ast.Lambda | ast.FunctionDef | ast.comprehension):
                    break
                if isinstance(above, ast.stmt):
                    return None if hasattr(above, "body") else above
    return None


def _is_bound_in(statements: Iterable[ast.stmt], name: str) -> bool:
    """Return whether each turn of a loop binds `name`, so that it is there after the last one."""
    return any(
        _is_bound_in(statement.body, name)
        if isinstance(statement, ast.With)  # torch.autocast
        else isinstance(statement, ast.Assign)
        and any(name in target_names(target) for target in statement.targets)
        for statement in statements
    )

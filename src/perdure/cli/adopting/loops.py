"""The lines for a loop of the script's own, where its next turn depends on nothing else.

A loop is left alone for every reason that this module can think of, since a run that resumes with
half of its state looks like one that resumes with all of it. What it cannot see, such as state in
other files, `perdure init --try` can.
"""

import ast
import re
from collections.abc import Iterable, Iterator

from perdure.cli.adopting.edits import Change, Edits, UnsureError
from perdure.cli.adopting.places import (
    check_once,
    has_keyword,
    insert_import,
    list_bound,
    list_visible,
    loop_of,
    owner_in,
)
from perdure.cli.adopting.script import Reading, Role, find_range
from perdure.worker.carried import SHOWS, list_carried, target_names, walk_body

_BLOCKS = (ast.If, ast.For, ast.While, ast.Try, ast.AsyncFor, ast.Match)
_HARMLESS = (*SHOWS, "append", "set_epoch", "to", "cuda", "size", "item", "train", "eval", "close",
             "flush", "items", "keys", "values", "get", "format", "join", "update", "zero_grad",
             "step", "startswith", "endswith")  # fmt: skip
"""Methods whose result does not depend on how often they were called; `step` and `update` are
looked at by themselves."""
_HANDED = (
    "args",
    "config",
    "cfg",
    "device",
    "rank",
    "local_rank",
    "world_size",
    "writer",
    "logger",
)
"""Names of what a loop only reads, or writes to."""
_LOSS = re.compile("loss|crit", re.IGNORECASE)
"""In the name of a function that has no state, by all custom."""
_SEEDS = ("manual_seed", "set_seed", "seed_everything", "manual_seed_all")
_TORCH_MANUAL = (
    "import perdure; above the loop, run = perdure.init() and run.register(model=model, "
    "optimizer=optimizer); the loop itself, for step in run.steps(N); in it, "
    "run.log(loss=loss.item()): docs/tutorial.md"
)
_ROLES: tuple[Role, ...] = ("model", "optimizer", "scheduler", "scaler")


def propose_loop(reading: Reading) -> Change:
    """Return the lines for the one loop that trains.

    Raises:
        UnsureError: there is none, or more than its lines would be needed.
    """
    chains = reading.find_training_loops()
    if not chains and (others := reading.find_object_loops()):
        raise UnsureError(
            f"line {others[0].lineno}: its optimizer belongs to an object, and what else that "
            "keeps from turn to turn is not known",
            _TORCH_MANUAL,
        )
    if len(chains) != 1:
        found = f"{len(chains)} training loops were found" if chains else "no training loop found"
        raise UnsureError(
            f"{found}: a loop in which an optimizer makes a step after backward()",
            _TORCH_MANUAL,
        )
    chain = chains[0]
    loop, inner = chain[0], chain[-1]
    batches = (
        "for step, batch in run.batches(dataset, batch_size=..., steps=...) in the place of the "
        "loop over the DataLoader: samples are then a function of seed and step, and a resumed "
        "run goes on in mid-epoch"
    )
    if isinstance(loop, ast.While):
        raise UnsureError(
            f"line {loop.lineno}: a `while` does not say how many steps there are",
            "for step in run.steps(N), where N is the last step, counted from the very first",
        )
    if len(chain) == 1 and find_range(loop) is None:
        raise UnsureError(
            f"line {loop.lineno}: no checkpoint would have the place in what it loops over",
            batches,
        )
    over = find_range(loop)
    if len(chain) > 2 or over is None:
        raise UnsureError(
            f"line {loop.lineno}: only `for step in range(N)` with the step in it, or one loop over"
            " data in it, is changed here",
            batches,
        )
    if len(over.args) > 2 or not _is_from_zero(over) or over.keywords:
        raise UnsureError(
            f"line {loop.lineno} does not count from 0: it may resume by itself",
            "run.steps(N) yields the step to go on at, so leave out what reads it from a file",
        )
    if any(isinstance(node, ast.Sub) for node in ast.walk(over)):
        raise UnsureError(
            f"line {loop.lineno} counts what is left: it may resume by itself",
            "run.steps(N) takes the number of all steps, of which some may be done",
        )
    for call in reading.methods("load_state_dict"):
        if owner_in(call, reading.names("optimizer")):
            raise UnsureError(
                f"line {call.lineno}: it resumes by itself",
                "leave that out: what is registered is restored when run.steps(N) begins",
            )
    check_once(reading, loop, _TORCH_MANUAL)
    _check_loop(reading, loop, inner, batches)
    registered = _list_registered(reading, loop, inner)
    return _write_loop(reading, loop, inner, over, registered, batches)


def _write_loop(
    reading: Reading,
    loop: ast.For,
    inner: ast.For | ast.While,
    over: ast.Call,
    registered: dict[str, str],
    batches: str,
) -> Change:
    run = "run"
    if run in list_bound(reading.tree) | set(reading.imports) or "*" in reading.imports:
        run = "perdure_run"
    edits = Edits(reading.text)
    insert_import(reading, edits, "import perdure")
    words = ", ".join(f"{word}={name}" for word, name in registered.items())
    edits.insert_above(loop, f"{run} = perdure.init()")
    edits.insert_above(loop, f"{run}.register({words})")
    edits.replace(over, f"{run}.steps({reading.segment(over.args[-1])})")
    by_hand = []
    loss = _find_loss(reading, loop)
    statement = _find_shown_loss(reading, loop, loss) if loss and inner is loop else None
    if statement is not None:
        edits.insert_above(statement, f"{run}.log(loss={loss}.item())")
    elif loss and inner is not loop and _is_bound_in(inner.body, loss):
        edits.insert_below(inner, f"{run}.log(loss={loss}.item())")
        by_hand.append(
            f"the loss of an epoch's last batch is logged, behind line {inner.end_lineno}; a mean "
            "that the script makes says more"
        )
    else:
        by_hand.append(f"{run}.log(loss=...) in the loop shows the loss in perdure watch")
    if inner is not loop:
        by_hand.append(
            f"a step of perdure's is one turn of line {loop.lineno} here, an epoch: what is lost "
            "with a rank is up to one of them, and a stop waits for its end. A preemption whose "
            f"notice is shorter than an epoch loses it. For a step a batch: {batches}"
        )
    if not any(call.func.attr in _SEEDS for call in reading.calls
               if isinstance(call.func, ast.Attribute)):  # fmt: skip
        by_hand.append(
            "nothing is seeded: what is drawn before the loop, such as a split of the data, is "
            "another one after a restart; torch.manual_seed(1) on top"
        )
    if lines := reading.describe().saves:
        by_hand.append(f"what line {lines[0]} saves is not needed to resume; it may stay")
    return Change(edits.apply(), by_hand=tuple(by_hand))


def _is_from_zero(over: ast.Call) -> bool:
    first = over.args[0]
    return len(over.args) == 1 or (isinstance(first, ast.Constant) and first.value == 0)


def _check_loop(reading: Reading, loop: ast.For, inner: ast.For | ast.While, batches: str) -> None:
    """Refuse a loop whose next turn depends on more than what is registered.

    Raises:
        UnsureError: it does, or that cannot be told.
    """
    if not isinstance(loop.target, ast.Name) or loop.orelse:
        raise UnsureError(f"line {loop.lineno} is not `for NAME in range(N):`", _TORCH_MANUAL)
    for node in walk_body(loop):
        leaves = isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Await) or (
            isinstance(node, ast.Break) and loop_of(reading, node) is loop
        )
        if leaves:
            raise UnsureError(
                f"line {getattr(node, 'lineno', loop.lineno)} leaves the loop before its end",
                "all ranks have to leave it at the same step: do so by the number of steps",
            )
    _check_data(reading, loop, inner, batches)
    _check_objects(reading, loop, batches)
    for call in reading.methods("step", inner):
        if call in (c for c in reading.methods("step") if reading.is_optimizer_step(c)):
            for above in reading.ancestors(call):
                if above is inner:
                    break
                if isinstance(above, _BLOCKS):
                    raise UnsureError(
                        f"line {call.lineno} makes a step of the optimizer only at times "
                        "(accumulation?), so a turn of the loop is not a step of training",
                        "run.batches(..., accumulate=K) yields the K micro-batches of a step",
                    )
    if not reading.methods("zero_grad", inner):
        raise UnsureError(f"the loop of line {inner.lineno} does not call zero_grad()")
    for name in list_carried(loop):
        if reading.roles.get(name, set()) & set(_ROLES):
            continue  # It is registered.
        raise UnsureError(
            f"`{name}` is carried from one turn of line {loop.lineno} to the next, and would begin "
            "anew in a resumed run",
            f"compute `{name}` from the step, or register an object that has it in its state_dict",
        )


def _check_data(reading: Reading, loop: ast.For, inner: ast.For | ast.While, batches: str) -> None:
    """Refuse data that are read on from turn to turn, and generators of the script's own."""
    inside = {id(node) for node in ast.walk(loop)}
    for call in reading.calls:
        name = reading.name_of(call.func)
        if id(call) in inside and (name in ("next", "anext") or name.endswith("__next__")):
            raise UnsureError(
                f"line {call.lineno} reads on in data, whose place in it no checkpoint would have",
                batches,
            )
        made = name.rpartition(".")[2]
        if made in ("DataLoader", "StatefulDataLoader") and has_keyword(call, "generator"):
            raise UnsureError(
                f"line {call.lineno}: the DataLoader has a generator, which no checkpoint has",
                "without it the loader draws from torch's own, which is saved",
            )
    for name in reading.names("generator"):
        for node in ast.walk(loop):
            if isinstance(node, ast.Name) and node.id == name:
                raise UnsureError(
                    f"`{name}`, used in line {node.lineno}, draws random numbers by itself",
                    "torch's, Python's and NumPy's global generators are saved; or seed one anew in"
                    " each step, by its number",
                )
    if inner is not loop:
        data = inner.iter if isinstance(inner, ast.For) else None
        while isinstance(data, ast.Call) and data.args and _is_wrapper(data):
            data = data.args[0]
        is_range = isinstance(data, ast.Call) and reading.name_of(data.func) == "range"
        name = data.id if isinstance(data, ast.Name) else ""
        if not is_range and not _begins_anew(reading, name):
            raise UnsureError(
                f"line {inner.lineno}: what it loops over is not known to begin anew in each epoch",
                batches,
            )


def _begins_anew(reading: Reading, name: str) -> bool:
    """Return whether a name is a DataLoader, by what it is assigned, or else by what it is called.

    A class of the script's own is none, whatever its name, and neither is an iterator of one.
    """
    if name in reading.names("loader"):
        return True
    classes = {node.name for node in ast.walk(reading.tree) if isinstance(node, ast.ClassDef)}
    for target, value in reading.list_assignments():
        made_by = reading.name_of(value.func) if isinstance(value, ast.Call) else ""
        if target == name and (made_by in classes or "loader" not in made_by.lower()):
            return False
    return "loader" in name.lower()


def _check_objects(reading: Reading, loop: ast.For, batches: str) -> None:
    """Refuse objects whose methods may return something else in each turn, such as batches."""
    bound = list_bound(ast.Module(loop.body, []))
    bound |= set(target_names(loop.target)) | set(reading.imports)
    tensors = {
        name
        for name, value in reading.list_assignments()
        if isinstance(value, ast.Call) and reading.name_of(value.func).startswith("torch.")
    }
    for node in walk_body(loop):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise UnsureError(f"line {node.lineno} binds names of another scope")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.id if isinstance(owner, ast.Name) else ""
        known = reading.roles.get(name, set()) - {"generator", "trainer"}
        in_place = node.func.attr.endswith("_") and name not in bound
        opaque = name not in bound | tensors and node.func.attr not in _HARMLESS
        if name and not known and (in_place or opaque):
            raise UnsureError(
                f"line {node.lineno}: what {name}.{node.func.attr}() does may depend on how often "
                "it was called, which no checkpoint has",
                f"data: {batches}",
                f"else: give `{name}` state_dict and load_state_dict, and register it",
            )
    _check_calls(reading, loop, bound | tensors)
    called = {call.func.id for call in reading.calls if isinstance(call.func, ast.Name)}
    for function in ast.walk(reading.tree):
        if isinstance(function, ast.FunctionDef) and function.name in called:
            for inner in ast.walk(function):
                if isinstance(inner, ast.Global | ast.Nonlocal):
                    raise UnsureError(
                        f"line {inner.lineno}: `{inner.names[0]}` outlives a call of "
                        f"{function.name}(), and is in no checkpoint"
                    )


def _check_calls(reading: Reading, loop: ast.For, known: set[str]) -> None:
    """Refuse calls of objects, and calls that are made for what they do to something.

    `known` are names that hold nothing from turn to turn.
    """
    defined = {n.name: n for n in ast.walk(reading.tree) if isinstance(n, ast.ClassDef)}
    modules = {name for name, node in defined.items()
               if any(ast.unparse(base).endswith("Module") for base in node.bases)}  # fmt: skip
    made: set[str] = set()
    plain: set[str] = set()
    for name, value in reading.list_assignments():
        if not isinstance(value, ast.Call):
            plain.add(name)
        elif reading.name_of(value.func).rpartition(".")[2] not in modules | {"partial"}:
            made.add(name)
    for node in _list_calls(loop):
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        judged = reading.roles.get(function, set()) & set(_ROLES)
        if function in made - known and not judged and not _LOSS.search(function):
            raise UnsureError(
                f"line {node.lineno}: what {function}() returns may depend on how often it was "
                "called, which no checkpoint has",
                f"give `{function}` state_dict and load_state_dict, and register it",
            )
        if not isinstance(reading.parents[node], ast.Expr) or function in ("", *SHOWS):
            continue
        handed = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {function}
        for name in sorted(handed - known - (plain - made) - set(_HANDED)):
            if not reading.roles.get(name) and not _LOSS.search(name):
                raise UnsureError(
                    f"line {node.lineno}: {function}() may change `{name}`, which is not known to "
                    "be in a checkpoint",
                    f"run.register({name}={name}), if it has state_dict and load_state_dict",
                )


def _list_calls(loop: ast.For) -> list[ast.Call]:
    return [node for node in walk_body(loop) if isinstance(node, ast.Call)]


def _is_wrapper(call: ast.Call) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) in ("enumerate", "tqdm")


def _list_registered(reading: Reading, loop: ast.For, inner: ast.For | ast.While) -> dict[str, str]:
    """Return word -> name of all that a checkpoint of this loop has to hold.

    Raises:
        UnsureError: something has a state and no name here, or may not be there.
    """
    for call in [*reading.methods("step", loop), *reading.methods("update", loop)]:
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        name = owner.id if isinstance(owner, ast.Name) else ""
        known = reading.roles.get(name, set()) & {"optimizer", "scheduler", "scaler"}
        stateless = call.func.attr == "update" and name and "ema" not in name.lower()
        if not known and not stateless and "prof" not in name.lower():
            raise UnsureError(
                f"line {call.lineno}: what `{reading.segment(owner)}` is was not found in this "
                "file, and it may have a state",
                "run.register(NAME=object) takes whatever has state_dict and load_state_dict",
            )
    names = [name for role in _ROLES for name in reading.names(role)]
    used = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    visible = list_visible(reading, loop)
    wrapped = _list_wrapped(reading)
    chosen = [
        name for name in dict.fromkeys(names) if name in visible and (name in used or (
            "model" in reading.roles[name] and name not in wrapped))
    ]  # fmt: skip
    chosen = [name for name in chosen if not wrapped.get(name, set()) & set(chosen) - {name}]
    for role in ("model", "optimizer"):
        if not any(role in reading.roles[name] for name in chosen):
            raise UnsureError(
                f"no {role} was found where line {loop.lineno} is",
                "run.register(model=..., optimizer=...) before the loop",
            )
    for name in chosen:
        _check_bound(reading, loop, name)
    return {name: name for name in chosen}


def _list_wrapped(reading: Reading) -> dict[str, set[str]]:
    """Return model -> names that hold it within DDP or what torch.compile made of it."""
    found: dict[str, set[str]] = {}
    for target, value in reading.list_assignments():
        if (name := reading.wraps(value)) and name != target:
            found.setdefault(name, set()).add(target)
    return found


def _check_bound(reading: Reading, loop: ast.For, name: str) -> None:
    """Refuse a name that may hold nothing, or nothing yet, when the loop begins."""
    always = False
    scopes = [reading.scope_of(loop), reading.tree]
    for node in ast.walk(reading.tree):
        if isinstance(node, ast.arg) and node.arg == name:
            always = always or reading.parents[reading.parents[node]] in scopes
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(isinstance(t, ast.Name) and t.id == name for target in targets
                   for t in ast.walk(target)):  # fmt: skip
            continue
        if isinstance(node.value, ast.Constant) or node.value is None:
            raise UnsureError(
                f"`{name}` may be nothing (line {node.lineno})",
                f"run.register({name}={name}) only where there is one",
            )
        if reading.scope_of(node) not in scopes:
            continue
        blocks = (reading.scope_of(node), *reading.ancestors(node))
        inside = any(isinstance(above, _BLOCKS) for above in _until_scope(blocks[1:]))
        always = always or (not inside and node.lineno < loop.lineno)
        if loop.lineno <= node.lineno <= (loop.end_lineno or loop.lineno):
            raise UnsureError(f"line {node.lineno} binds `{name}` anew in the loop")
    if not always:
        raise UnsureError(
            f"`{name}` is not surely there when line {loop.lineno} begins",
            f"run.register({name}={name}) once it is",
        )


def _until_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            return
        yield node


def _find_loss(reading: Reading, loop: ast.For) -> str:
    """Return what the loss is called; empty where several are, or none has a name."""
    names = set()
    for call in reading.methods("backward", loop):
        assert isinstance(call.func, ast.Attribute)
        backed = call.func.value
        if isinstance(backed, ast.Call) and len(backed.args) == 1:  # scaler.scale(loss)
            backed = backed.args[0]
        names.add(backed.id if isinstance(backed, ast.Name) and not call.args else "")
    return names.pop() if len(names) == 1 else ""


def _find_shown_loss(reading: Reading, loop: ast.For, loss: str) -> ast.stmt | None:
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
    """Return whether each turn of a loop binds `name`, so that it is there behind the last one."""
    return any(
        _is_bound_in(statement.body, name)
        if isinstance(statement, ast.With)  # torch.autocast
        else isinstance(statement, ast.Assign)
        and any(name in target_names(target) for target in statement.targets)
        for statement in statements
    )

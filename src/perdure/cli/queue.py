"""`perdure queue`: many runs, one after another or one a GPU, each until it is done."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.speech.say import Json, answer, keep_given, note, render_table
from perdure.model.errors import ConfigError, SafetyError
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure.control.queue import Book, QueueEntry
    from perdure.model.queue import Item, Planned
    from perdure.service.queue.store import QueueStore

app = typer.Typer(help="Many runs, each until it is done.", no_args_is_help=True)
CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}

QueueName = Annotated[str, typer.Option("--queue", metavar="QUEUE", help="Which queue.")]
Names = Annotated[list[str], typer.Argument(metavar="ITEM...", help="Names of items.")]


@app.command(context_settings=CONTEXT)
def add(
    words: Annotated[
        list[str],
        typer.Argument(metavar="FILE | COMMAND...", help="A queue file, a job file, or a command."),
    ],
    name: Annotated[str | None, typer.Option("--name", help="Of the item.")] = None,
    after: Annotated[
        list[str] | None, typer.Option("--after", help="An item that has to be done before.")
    ] = None,
    done: Annotated[
        list[str] | None, typer.Option("--done", help="A file that proves it; it is not run then.")
    ] = None,
    priority: Annotated[int | None, typer.Option("--priority", help="Higher ones first.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="Slots that it takes.")] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", min=0, help="After the first.")
    ] = None,
    backoff_s: Annotated[
        float | None, typer.Option("--backoff", min=0, help="Seconds before the first retry.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PROFILE", help="Launch the job there.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Seconds for one attempt; 0: no limit.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Take out what waits and is not in FILE.")
    ] = False,
    queue: QueueName = "default",
    as_json: Json = False,
) -> None:
    """Add items, or change waiting ones. Items that run or are done stay."""
    from perdure.service.queue.store import QueueStore

    options = keep_given(
        name=name,
        after=after,
        done=done,
        priority=priority,
        gpus=gpus,
        retries=retries,
        backoff_s=backoff_s,
        timeout_s=timeout_s,
        on=on,
    )
    items = [_complete(planned) for planned in _plan(words, options)]
    changes, differing = _put(QueueStore(resolve_home(), queue), items, prune)
    for item_name, state in differing.items():
        note(f"{item_name} is {state} and stays as it was; its description differs")
    counts = [f"{len(changes[k])} {k}" for k in ("added", "updated", "removed") if changes[k]]
    text = f"queue {queue}: {', '.join(counts) or 'nothing to change'}"
    answer({"queue": queue, **changes}, text, as_json=as_json)


def _put(
    store: "QueueStore", items: "list[Item]", prune: bool
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what became of which items, and the states of those whose new description is late."""
    from perdure.model.queue import Put, Removed

    now = time.time()
    with store.writing() as writer:
        lines = writer.book.lines
        old = {item.name: lines[item.name] for item in items if item.name in lines}
        _check_needs(items, writer.book)
        stopping = next((name for name, line in old.items() if line.removed), "")
        if stopping:
            raise SafetyError(
                f"`{stopping}` was taken out, and its attempt is being stopped",
                hint="add it once `perdure queue ls` does not show it",
            )
        kept = {n: line.state for n, line in old.items() if line.state in ("running", "done")}
        new = [i for i in items if i.name not in old or i != old[i.name].item]
        fresh = [item for item in new if item.name not in kept]
        names = {item.name for item in items}
        gone = [
            name
            for name, line in lines.items()
            if prune and name not in names and line.state in ("waiting", "failed")
        ]
        writer.append(*(Put(now, item) for item in fresh), *(Removed(now, n) for n in gone))
    changes = {
        "added": [item.name for item in fresh if item.name not in old],
        "updated": [item.name for item in fresh if item.name in old],
        "kept": [item.name for item in items if item not in fresh],
        "removed": gone,
    }
    return changes, {item.name: kept[item.name] for item in new if item.name in kept}


def _plan(words: list[str], options: dict[str, Any]) -> "tuple[Planned, ...]":
    """Return the items that a command line asks for."""
    from msgspec.structs import replace

    from perdure.cli.running.jobspec import read_job_file

    path = words[0]
    if len(words) == 1 and path.endswith((".toml", ".json")):
        document = read_job_file(path)
        if "item" in document:
            if options:
                raise ConfigError(
                    f"{path} is a queue file, which says this itself",
                    hint=f"leave out --{next(iter(options)).removesuffix('_s')}",
                )
            return _convert(document, path, os.path.dirname(os.path.abspath(path)))
        job_name = options.pop("name", None) or document.get("name") or Path(path).stem
        return _convert({"item": [{"name": job_name, "job": path, **options}]}, "options", ".")
    if "name" not in options:
        raise ConfigError("the item has no name", hint="perdure queue add --name N COMMAND...")
    (planned,) = _convert({"item": [{"command": ["-"], **options}]}, "options", ".")
    return (replace(planned, item=replace(planned.item, command=tuple(words))),)


def _convert(document: dict[str, Any], place: str, folder: str) -> "tuple[Planned, ...]":
    """Return the items of a document; their paths become absolute.

    Raises:
        ConfigError: a field is unknown or wrong, or an entry cannot be.
    """
    import msgspec

    from perdure.model.input.source import find_misfit
    from perdure.model.queue import QueueFile, expand_file

    wrong = find_misfit(document, QueueFile, "its fields are in docs/queue.md")
    if wrong is not None:
        at = f"{wrong.place}: " if wrong.place else ""
        raise ConfigError(f"{place}: {at}{wrong.what}", hint=wrong.hint)
    try:
        planned = expand_file(msgspec.convert(document, QueueFile))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.message}", hint=error.hint) from error
    return tuple(_locate(one, folder) for one in planned)


def _locate(one: "Planned", folder: str) -> "Planned":
    from msgspec.structs import replace

    cwd = os.path.abspath(os.path.join(folder, os.path.expanduser(one.item.cwd)))
    on = one.item.on
    by_path = os.path.abspath(os.path.join(folder, os.path.expanduser(on)))
    item = replace(one.item, cwd=cwd, on=by_path if on.endswith(".toml") else on)
    job = os.path.join(folder, os.path.expanduser(one.job)) if one.job else ""
    return replace(one, item=item, job=job)


def _complete(planned: "Planned") -> "Item":
    """Return the item with its job's document, as the job file says now."""
    from msgspec.structs import replace

    from perdure.cli.running.jobspec import read_job_file, validate
    from perdure.model.queue import replace_fields

    if not planned.job:
        return planned.item
    document = replace_fields(read_job_file(planned.job), planned.set)
    document["name"] = planned.item.name
    if isinstance(document.get("args"), list):
        document["args"] = [str(word) for word in document["args"]]  # A grid's numbers are words.
    if planned.item.on:  # The document is launched from another folder than the file's.
        launch = document.setdefault("launch", {})
        project = os.path.expanduser(launch.get("project", "."))
        launch["project"] = os.path.abspath(os.path.join(os.path.dirname(planned.job), project))
    validate(document, f"{planned.job} (item `{planned.item.name}`)")
    return replace(planned.item, job=document)


def _check_needs(items: "list[Item]", book: "Book") -> None:
    """Check that all that items wait for exists, and that none waits for itself.

    Raises:
        ConfigError: otherwise.
    """
    from graphlib import CycleError, TopologicalSorter

    needs = {line.item.name: line.item.after for line in book.lines.values()}
    needs |= {item.name: item.after for item in items}
    for item in items:
        others = ", ".join([name for name in needs if name != item.name][:8])
        for other in item.after:
            if other not in needs:
                raise ConfigError(
                    f"item `{item.name}`: after `{other}`, which is not in the queue",
                    hint=f"there is {others or 'none'}",
                )
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        name = next(item.name for item in items if item.name in error.args[1])
        raise ConfigError(f"item `{name}` waits for itself", hint="see its `after`") from None


@app.command("ls")
def list_items(queue: QueueName = "default", as_json: Json = False) -> None:
    """List the items of a queue, and why each is as it is."""
    from perdure.service.queue.store import QueueStore, read_runner_pid

    store = QueueStore(resolve_home(), queue)
    book, pid, now = store.read(), read_runner_pid(store), time.time()
    rows = _describe_all(store, book, now)
    table = render_table(
        ("item", "state", "attempts", "priority", "why"),
        [(r["name"], r["state"], r["attempts"], r["priority"], r["reason"]) for r in rows],
    )
    runs = f"run by pid {pid}" if pid else "not being run; `perdure queue run` does"
    text = f"{table}\n{runs}" if rows else f"queue {queue} is empty; `perdure queue add` fills it"
    answer({"queue": queue, "runner": pid or None, "items": rows}, text, as_json=as_json)


def _describe_all(store: "QueueStore", book: "Book", now: float) -> list[dict[str, Any]]:
    states = ("running", "waiting", "failed", "done")
    lines = sorted(
        book.lines.values(), key=lambda x: (states.index(x.state), -x.item.priority, x.order)
    )
    return [_describe(store, book, line, now) for line in lines]


def _describe(store: "QueueStore", book: "Book", line: "QueueEntry", now: float) -> dict[str, Any]:
    from perdure.control.queue import explain
    from perdure.service.queue.store import OUTPUT

    item = line.item
    blocked = line.state == "waiting" and bool(book.find_block(line))
    log = store.attempt(item.name, line.attempts) / OUTPUT if line.attempts else ""
    where = f"attempt {line.attempts} on {', '.join(line.slots) or 'no slot'}"
    return {
        "name": item.name,
        "state": "blocked" if blocked else line.state,
        "attempts": line.attempts,
        "priority": item.priority,
        "after": item.after,
        "gpus": item.gpus,
        "slots": line.slots,
        "reason": where if line.state == "running" else explain(book, line, now),
        "log": str(log),
    }


@app.command("rm")
def remove(
    names: Names,
    stop: Annotated[bool, typer.Option("--stop", help="Stop it where it runs.")] = False,
    queue: QueueName = "default",
    as_json: Json = False,
) -> None:
    """Take items out. What they wrote stays."""
    from perdure.model.queue import Removed
    from perdure.service.queue.store import QueueStore, read_runner_pid

    store = QueueStore(resolve_home(), queue)
    with store.writing() as writer:
        book = writer.book
        for name in names:
            line = _find_entry(book, name)
            if line.state == "running" and not stop:
                raise SafetyError(f"`{name}` runs", hint="--stop asks it to end")
            needed = [
                o.item.name
                for o in book.lines.values()
                if name in o.item.after and o.item.name not in names and o.state != "done"
            ]
            if needed and line.state != "done":
                raise SafetyError(
                    f"`{needed[0]}` waits for `{name}`", hint="take both out, or that one first"
                )
        ran = [name for name in names if book.lines[name].state == "running"]
        writer.append(*(Removed(time.time(), name) for name in names))
    if ran and not read_runner_pid(store):
        note("`perdure queue run` will stop what runs: nobody runs the queue now")
    text = f"queue {queue}: {len(names)} taken out" + (f", {len(ran)} stopping" if ran else "")
    answer({"queue": queue, "removed": names, "stopping": ran}, text, as_json=as_json)


@app.command("retry")
def retry(names: Names, queue: QueueName = "default", as_json: Json = False) -> None:
    """Run items again that failed or are done, with all their attempts."""
    from perdure.model.queue import Again
    from perdure.service.queue.store import QueueStore

    store = QueueStore(resolve_home(), queue)
    with store.writing() as writer:
        for name in names:
            if _find_entry(writer.book, name).state == "running":
                raise ConfigError(f"`{name}` runs", hint=f"perdure queue rm --stop {name}")
        writer.append(*(Again(time.time(), name) for name in names))
    text = f"queue {queue}: {len(names)} will run again"
    answer({"queue": queue, "again": names}, text, as_json=as_json)


@app.command("run")
def run_queue(
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, help="Number of items at once, whatever GPUs there are."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Wait for new items when all are done.")
    ] = False,
    queue: QueueName = "default",
    as_json: Json = False,
) -> int:
    """Run a queue to its end: one item per GPU, or one after another without GPUs.

    Ctrl-C leaves what runs running; the next `perdure queue run` takes it up.
    """
    from perdure.adapters.devices import list_gpus
    from perdure.control.queue import list_oversized
    from perdure.service.queue.holder import CPU_SLOT
    from perdure.service.queue.runner import Runner
    from perdure.service.queue.store import QueueStore

    gpus = () if slots else list_gpus()
    chosen = gpus or tuple(f"{CPU_SLOT}{number}" for number in range(slots or 1))
    store = QueueStore(resolve_home(), queue)
    book = Runner(store, chosen, note).run(keep=keep)
    rows = _describe_all(store, book, time.time())
    for line in list_oversized(book, chosen):
        note(f"{line.item.name} needs {line.item.gpus} slots; there are {len(chosen)}")
    done = sum(row["state"] == "done" for row in rows)
    left = [row for row in rows if row["state"] != "done"]
    lines = (f"\n  {row['name']}: {row['state']}: {row['reason']}" for row in left)
    text = f"queue {queue}: {done} of {len(rows)} done{''.join(lines)}"
    answer({"queue": queue, "done": done, "left": len(left), "items": rows}, text, as_json=as_json)
    return 0 if done == len(rows) else 1


def _find_entry(book: "Book", name: str) -> "QueueEntry":
    line = book.lines.get(name)
    if line is None:
        raise ConfigError(f"no item `{name}`", hint="perdure queue ls")
    return line

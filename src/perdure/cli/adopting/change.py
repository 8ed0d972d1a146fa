"""The few lines that make a script resumable: proposed where surely right, else in words."""

import ast
import re

from perdure.cli.adopting.edits import Change, Edits, UnsureError
from perdure.cli.adopting.loops import propose_loop
from perdure.cli.adopting.places import (
    check_once,
    find_statement,
    has_keyword,
    insert_import,
    list_bound,
    list_visible,
    owner_in,
)
from perdure.cli.adopting.script import Reading, parse
from perdure.model.errors import ConfigError


def propose_change(reading: Reading) -> Change:
    """Return the change that makes a script resumable, or why none is proposed."""
    try:
        change = _propose(reading)
        parse(change.text, "the changed script")
    except UnsureError as unsure:
        return Change(why=unsure.why, by_hand=unsure.by_hand)
    except (ConfigError, RecursionError):
        return Change(why="its text is laid out in a way that is not understood here")
    return change


def _propose(reading: Reading) -> Change:
    script = reading.describe()
    match script.kind:
        case "perdure":
            raise UnsureError("it calls perdure already")
        case "torchft":
            raise UnsureError(
                "it trains with torchft, which keeps its state alive in the other groups",
                "perdure run --torchft serves its lighthouse, with no line of the script; "
                "`import perdure.torchft` adds settings that can be changed (docs/torchft.md)",
            )
        case "deepspeed" | "accelerate":
            raise UnsureError(
                f"it trains by {script.kind}, which perdure has not been tried with",
                "as it is, perdure run starts it again after a failure, and it resumes by its own "
                "checkpoints, if it writes and reads any",
            )
        case "other":
            raise UnsureError(
                "it does not import torch itself",
                "name the file that has the training loop",
            )
    if script.spawns:
        raise UnsureError(
            f"line {script.spawns[0]} makes processes of its own",
            "let it train in the process that it is, with RANK, WORLD_SIZE and LOCAL_RANK from the "
            "environment, as under torchrun",
        )
    _check_names(reading)
    if script.kind in ("huggingface", "lightning"):
        return _propose_trainer(reading, script.kind)
    if "fsdp" in script.parallel:
        raise UnsureError(
            "it uses FullyShardedDataParallel (FSDP1), whose state perdure has not been tried with",
            "fully_shard (FSDP2) is saved and resharded; then register model and optimizer",
        )
    return propose_loop(reading)


def _check_names(reading: Reading) -> None:
    if re.search(r"\r(?!\n)", reading.text):
        raise UnsureError("its lines end in an unusual way")
    bound = {node.id for node in ast.walk(reading.tree) if isinstance(node, ast.Name)}
    if "perdure" in bound or "range" in list_bound(reading.tree):
        raise UnsureError("it has its own `perdure` or `range`")


# --- Trainers --------------------------------------------------------------------------------


def _propose_trainer(reading: Reading, kind: str) -> Change:
    method, package = ("train", "transformers") if kind == "huggingface" else ("fit", "lightning")
    line = f"perdure.{kind}.attach(trainer)"
    manual = f"`import perdure.{kind}`, and {line} before trainer.{method}(): docs/trainers.md"
    made = [call for call in reading.calls if reading.library_of(call)]
    libraries = {reading.library_of(call) for call in made}
    if "trl" in libraries:
        raise UnsureError("perdure has not been tried with the trainers of trl", manual)
    if libraries == {"pytorch_lightning"}:
        raise UnsureError(
            "it imports pytorch_lightning, and perdure's adapter is for the package `lightning`",
            "`import lightning.pytorch as pl` in its place, then perdure init again",
        )
    _check_trainer_options(reading)
    calls = [c for c in reading.methods(method) if owner_in(c, reading.names("trainer"))]
    if len(libraries) != 1 or len(made) != 1 or len(calls) != 1:
        raise UnsureError(
            f"{len(made)} Trainers of {package} and {len(calls)} calls of {method}() are in it",
            manual,
        )
    call = calls[0]
    assert isinstance(call.func, ast.Attribute)
    assert isinstance(call.func.value, ast.Name)
    try:
        statement = find_statement(reading, call)
        check_once(reading, statement)
    except UnsureError as unsure:
        raise UnsureError(unsure.why, manual) from None
    name = call.func.value.id
    if name not in list_visible(reading, statement):
        raise UnsureError(f"`{name}` is not bound where {method}() is called", manual)
    edits = Edits(reading.text)
    insert_import(reading, edits, f"import perdure.{kind}")
    edits.insert_above(statement, f"perdure.{kind}.attach({name})")
    by_hand = []
    if kind == "lightning" and not has_keyword(made[0], "devices"):
        by_hand.append(
            'more than one rank: Trainer(devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), '
            'strategy="ddp")'
        )
    return Change(edits.apply(), by_hand=tuple(by_hand))


def _check_trainer_options(reading: Reading) -> None:
    for call in reading.calls:
        for word in call.keywords:
            said = not (isinstance(word.value, ast.Constant) and not word.value.value)
            if word.arg in ("deepspeed", "fsdp", "auto_find_batch_size") and said:
                raise UnsureError(
                    f"line {word.value.lineno}: perdure does not resume a Trainer with {word.arg}",
                    "leave it out, or see docs/trainers.md",
                )
            text = str(getattr(word.value, "value", ""))
            if word.arg == "strategy" and text.startswith(("fsdp", "deepspeed", "ddp_spawn")):
                raise UnsureError(f"perdure cannot resume Lightning's {text}", 'strategy="ddp"')
    if called := reading.methods("hyperparameter_search"):
        raise UnsureError(f"line {called[0].lineno} trains many times in one process")

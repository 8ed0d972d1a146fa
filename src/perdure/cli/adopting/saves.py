"""Where a script saves checkpoints of its own, as patterns for `checkpoint.own`."""

import ast
import itertools
import os
from collections.abc import Iterator, Sequence

from perdure.cli.adopting.script import Reading

_WRITERS = {"save": 1, "save_file": 1, "save_model": 1}
"""Function of torch or safetensors -> the position of its path."""
_NAMESPACES = ("torch.", "safetensors.")


def find_patterns(reading: Reading, args: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of the checkpoints that a script saves, as far as its text says where.

    `args` are the script's: a Trainer's folder often stands there. A single file counts only if the
    script loads something: otherwise it is the result.
    """
    loads = bool(reading.describe().loads)
    found = [pattern for pattern in _list_patterns(reading, args) if not os.path.isabs(pattern)]
    kept = (p for p in found if p.strip("*./") and (loads or "*" in p))
    return tuple(dict.fromkeys(kept))


def _list_patterns(reading: Reading, args: Sequence[str]) -> Iterator[str]:
    trains = False
    for call in reading.calls:
        name = reading.name_of(call.func)
        last = name.rpartition(".")[2] or getattr(call.func, "attr", "")
        if last == "TrainingArguments":
            trains = True
            yield from _join(_find_argument(reading, call, 0, "output_dir"), "checkpoint-*")
        elif last == "ModelCheckpoint":
            yield from _join(_find_argument(reading, call, 0, "dirpath"), "*.ckpt")
        elif last == "save_checkpoint":  # DeepSpeed's engine
            yield from _join(_find_argument(reading, call, 0, "save_dir"), "global_step*")
        elif last == "save_state":  # accelerate's
            yield from _join(_find_argument(reading, call, 0, "output_dir"), "")
        elif name == "torch.distributed.checkpoint.save":
            yield from _join(_find_argument(reading, call, -1, "checkpoint_id"), "")
        elif last in _WRITERS and name.startswith(_NAMESPACES):
            named = "f" if name.startswith("torch.") else "filename"
            yield from _join(_find_argument(reading, call, _WRITERS[last], named), "")
    if trains or any("Trainer" in name for name in reading.imports):
        for flag, value in itertools.pairwise(args):
            if flag in ("--output_dir", "--output-dir"):
                yield os.path.join(value, "checkpoint-*")


def _join(folder: str, name: str) -> Iterator[str]:
    if folder:
        yield os.path.join(folder, name) if name else folder


def _find_argument(reading: Reading, call: ast.Call, position: int, name: str) -> str:
    for keyword in call.keywords:
        if keyword.arg == name:
            return _render(reading, keyword.value)
    given = call.args[position : position + 1] if position >= 0 else []
    return _render(reading, given[0]) if given else ""


def _render(reading: Reading, node: ast.expr) -> str:
    """Return a path with a * for each unknown part; empty if all of it is unknown."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=value):
            return _render(reading, value)
        case ast.JoinedStr(values=parts):
            return "".join(_render(reading, part) or "*" for part in parts)
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            head, tail = _render(reading, left), _render(reading, right)
            return os.path.join(head, tail or "*") if head else ""
        case ast.Call(args=[first, *rest]) if reading.name_of(node.func) == "os.path.join":
            head = _render(reading, first) or "*"
            return os.path.join(head, *(_render(reading, one) or "*" for one in rest))
        case ast.Call(args=[only]) if reading.name_of(node.func) == "pathlib.Path":
            return _render(reading, only)
        case ast.Name(id=name):
            return _find_constant(reading, name)
    return ""


def _find_constant(reading: Reading, name: str) -> str:
    """Return the text that a variable is assigned once in the script."""
    values = [
        node.value for node in ast.walk(reading.tree) if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    ]  # fmt: skip
    one = values[0] if len(values) == 1 else None
    return one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else ""

"""Torch's index of a sharded checkpoint, and what ranks tell each other of it, read as data.

Both are pickles, and a pickle may call whatever it can name. Here it can name what is in a table,
by exactly these words: nothing is imported for it, and no attribute is looked up, since a dotted
name (`filesystem`, `os.system`) leads from any module to any other. The table holds what makes
values and does nothing else. Python's own unpickler in Python is used instead of the one in C
(about 3 times as long, 4 s for an index of 64,000 shards) because its opcodes are a table as well:
those that torch never writes are left out, and BUILD fills fields of an index's values only. The
one in C would let a stream set attributes of the classes themselves.

A stream may also name one value many times over, so that forty nested pairs are hashed, compared
or printed as 2^40. What is hashed is therefore counted, each part as often as hashing looks at it,
and a stream that has more of that than its length explains is refused; nothing of it is printed.
"""

import io
import pickle
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage

from perdure.model.input.relative import explain_unsafe

INDEX = ".metadata"

_FILLED: tuple[type, ...] = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta,
    metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, filesystem._StorageInfo, filesystem._StoragePrefix,
    planner.SavePlan, planner.WriteItem, planner.TensorWriteData, planner.BytesIOWriteData,
    storage.WriteResult,
)  # fmt: skip
"""Whose instances BUILD may fill."""
_MADE = (
    *_FILLED, metadata._MEM_FORMAT_ENCODING, planner.WriteItemType, OrderedDict, set, frozenset,
    slice, complex, Path, PosixPath, PurePosixPath,
)  # fmt: skip
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_TABLE: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _MADE},
    # Python 3.13 moved the classes of paths, and 3.14 moved them back.
    **{(module, kind.__name__): kind
       for module in ("pathlib", "pathlib._local") for kind in (Path, PosixPath, PurePosixPath)},
    **{("torch", name): value for name, value in _DTYPES.items()},
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
}  # fmt: skip
"""(module, name) -> what is meant, whatever has become of the module since."""
_NEVER = (
    pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4,
    pickle.PERSID, pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
)  # fmt: skip
"""Opcodes that no index has."""
_PARTS_A_BYTE, _PARTS_MIN = 64, 100_000
"""Parts that may be hashed for each byte of a stream, and in any case; an index has about one."""


_HASHED: dict[bytes, slice] = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
    pickle.REDUCE: slice(-1, None),
    pickle.NEWOBJ: slice(-1, None),
}
"""Opcode -> what of the stack it hashes, or may: whatever is made may hash its arguments."""


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        op: call for op, call in pickle._Unpickler.dispatch.items() if bytes([op]) not in _NEVER
    }
    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._parts_left = _PARTS_MIN + _PARTS_A_BYTE * len(data)

    def _weigh(self, left: list[Any]) -> None:
        """Count what hashing `left` looks at, so that it ends; refuse what is too much."""
        while left:
            one = left.pop()
            self._parts_left -= 1
            if self._parts_left < 0:
                raise pickle.UnpicklingError("the index has values nested without end")
            if isinstance(one, tuple | list | set | frozenset | dict):
                left += one
            elif isinstance(one, slice):
                left += (one.start, one.stop, one.step)
            elif type(one) in _FILLED:
                left += vars(one).values()

    def find_class(self, module: str, name: str) -> Any:
        """Return what the table has under exactly this name; refuse everything else."""
        try:
            return _TABLE[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the index names {module}.{name}") from None

    def load_build(self) -> None:
        """Fill the fields of an instance; never those of a class, and with no code but torch's."""
        state = self.stack.pop()
        one = self.stack[-1]
        if type(one) not in _FILLED:
            raise pickle.UnpicklingError(f"the index alters {_name(one)}")
        if isinstance(one, metadata.TensorProperties):
            metadata.TensorProperties.__setstate__(one, state)  # type: ignore[no-untyped-call]
        elif isinstance(state, dict):
            vars(one).update(state)
        else:
            raise pickle.UnpicklingError(f"the index fills {_name(one)} with {_name(state)}")

    dispatch[pickle.BUILD[0]] = load_build


def _make_weighing(op: bytes, hashed: slice) -> Callable[[Any], None]:
    """Return what an opcode does, once what it hashes has been counted."""
    load = _Unpickler.dispatch[op[0]]

    def weigh_and_load(one: _Unpickler) -> None:
        one._weigh(one.stack[hashed])
        load(one)

    return weigh_and_load


for _op, _hashed in _HASHED.items():
    _Unpickler.dispatch[_op[0]] = _make_weighing(_op, _hashed)


def _name(one: Any) -> str:
    """Return what a value is, in a word that does not depend on what it holds."""
    return f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__


def read_plain(data: bytes) -> Any:
    """Return what a pickle of an index's types holds.

    Raises:
        pickle.UnpicklingError: it names anything else, or is damaged.
    """
    try:
        return _Unpickler(data).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # A damaged stream raises nearly anything.
        words = " ".join(each[:200] for each in error.args if isinstance(each, str))
        why = f"{type(error).__name__} {words}".strip()
        raise pickle.UnpicklingError(f"the index is damaged: {why}") from None


def read_index(folder: Path) -> metadata.Metadata:
    """Return the index of the sharded checkpoint in `folder`; all its files are in that folder.

    Raises:
        OSError: it cannot be read.
        pickle.UnpicklingError: it is no index, or asks for something else than data.
    """
    path = folder / INDEX
    if not stat.S_ISREG(path.stat().st_mode):
        raise pickle.UnpicklingError(f"{INDEX} is no regular file")
    index: metadata.Metadata = read_plain(path.read_bytes())
    places = getattr(index, "storage_data", None)
    whole = type(index) is metadata.Metadata and isinstance(index.state_dict_metadata, dict)
    if not whole or not isinstance(places or {}, dict):
        raise pickle.UnpicklingError("there is no index in it")
    for place in (places or {}).values():
        if type(place) is not filesystem._StorageInfo or not isinstance(place.relative_path, str):
            raise pickle.UnpicklingError(f"the index has no place in {_name(place)}")
        why = explain_unsafe(place.relative_path)
        if why:
            raise pickle.UnpicklingError(
                f"the index reads {place.relative_path!r:.80}, which {why}"
            )
    return index

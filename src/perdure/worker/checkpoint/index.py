"""Torch's index of a sharded checkpoint, and what ranks tell each other of it, read as data.

Both are pickles, and a pickle may call whatever it can name. Here it can name what is in a table,
by exactly these words: nothing is imported for it, and no attribute is looked up, since a dotted
name (`filesystem`, `os.system`) leads from any module to any other. The table holds what makes
values and does nothing else. Python's own unpickler in Python is used instead of the one in C
(about 3 times as long, 4 s for an index of 64,000 shards) because its opcodes are a table as well:
those that torch never writes are left out, and BUILD fills fields of an index's values only. The
one in C would let a stream set attributes of the classes themselves.
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

from perdure.model.relative import explain_unsafe

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


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        op: call for op, call in pickle._Unpickler.dispatch.items() if bytes([op]) not in _NEVER
    }
    stack: list[Any]

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
            raise pickle.UnpicklingError(f"the index alters {one!r:.80}")
        if isinstance(one, metadata.TensorProperties):
            metadata.TensorProperties.__setstate__(one, state)  # type: ignore[no-untyped-call]
        elif isinstance(state, dict):
            vars(one).update(state)
        else:
            raise pickle.UnpicklingError(f"the index fills {type(one).__name__} with {state!r:.80}")

    dispatch[pickle.BUILD[0]] = load_build


def read_plain(data: bytes) -> Any:
    """Return what a pickle of an index's types holds.

    Raises:
        pickle.UnpicklingError: it names anything else, or is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # A damaged stream raises nearly anything.
        raise pickle.UnpicklingError(f"the index is damaged: {error!r:.200}") from error


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
            raise pickle.UnpicklingError(f"the index has no place in {place!r:.80}")
        why = explain_unsafe(place.relative_path)
        if why:
            raise pickle.UnpicklingError(
                f"the index reads {place.relative_path!r:.80}, which {why}"
            )
    return index

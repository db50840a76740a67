"""What torch's distributed checkpoints hold besides tensors: objects, each in an archive of its own, that torch unpickles."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lora_tool.core.errors import CorruptFile, Problem
from lora_tool.formats.distributed_tensors import KNOWN
from lora_tool.formats.files import inside, open_regular, read_all, read_at
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pickle_objects import Global, Stub, name_of
from lora_tool.formats.pickles import MAX_PICKLE_BYTES, load, names_in, no_storage
from lora_tool.formats.torch_zip import LARGEST, pickles_in


def objects_beside(metadata: Path) -> Iterator[Problem]:
    """Yield the problems of `foreign_objects` for metadata that was not read. Raises `CorruptFile`."""
    try:
        held, _ = load(read_all(metadata, limit=MAX_PICKLE_BYTES), known=KNOWN, persistent=no_storage)
    except ValueError:  # another rule's
        return
    if isinstance(held, Stub):
        yield from foreign_objects(metadata, held)


def foreign_objects(metadata: Path, held: Stub) -> Iterator[Problem]:
    """Yield the problem of each `.distcp` file in which an object that is no tensor calls what no checkpoint needs.

    torch unpickles those as they are: counters, learning rates, states of data loaders
    (`DefaultLoadPlanner.load_bytes`, torch 2.13). `held` is what the file `metadata` holds, which says where they lie.
    """
    found: dict[Path, dict[Global, bool]] = defaultdict(dict)
    seen: set[bytes] = set()  # each parameter has the same learning rate
    left = MAX_PICKLE_BYTES
    for path, places in _objects(metadata.parent, held).items():
        with contextlib.suppress(CorruptFile), open_regular(path) as fd:
            for at, nbytes in places:
                left -= nbytes
                stored = read_at(path, fd, at, nbytes) if left >= 0 else b""
                if stored and stored not in seen:
                    seen.add(stored)
                    for pickled in pickles_in(io.BytesIO(stored)) if stored.startswith(b"PK") else (stored,):
                        found[path] |= names_in(pickled)
    for path, names in found.items():
        yield from problems_of(path, names)


def _objects(folder: Path, held: Stub) -> dict[Path, list[tuple[int, int]]]:
    """Return the places of the stored objects that are no tensors, by file."""
    places = defaultdict[Path, list[tuple[int, int]]](list)
    entries, storage = held.get("state_dict_metadata", dict) or {}, held.get("storage_data", dict) or {}
    for key, info in storage.items():
        name = key.get("fqn") if isinstance(key, Stub) else None
        if not isinstance(name, str) or not isinstance(info, Stub) or is_tensor(entries.get(name)):
            continue
        file, at, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if isinstance(file, str) and type(at) is int and type(nbytes) is int and inside(folder, folder / file):
            places[folder / file].append((at, min(nbytes, LARGEST)))
    return places


def is_tensor(entry: object) -> bool:
    """Return whether an entry of the metadata is a tensor's."""
    return isinstance(entry, Stub) and name_of(type(entry)).endswith("TensorStorageMetadata")

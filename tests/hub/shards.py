"""The little of Xet's shard format that a Hub needs: which Xet hash a file has whose sha256 is in a commit.

Format: `mdb_shard` of xet-core. A shard begins with a 48-byte header; then files follow, each a 48-byte header (hash,
flags, number of entries), its 48-byte entries, as many verification entries if flag 31 is set, and one metadata entry
with the sha256 if flag 30 is set. A file hash of ones ends the list. Hashes are four little-endian numbers of 64 bits.
"""

from __future__ import annotations

import struct
from pathlib import Path

_ENTRY = 48
_VERIFICATION, _METADATA = 1 << 31, 1 << 30


def xet_hashes(folder: Path) -> dict[str, str]:
    """Return sha256 → Xet hash of all files in the shards below `folder`."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.mdb")):
        found.update(_read(path.read_bytes()))
    return found


def _read(data: bytes) -> dict[str, str]:
    found, at = {}, _ENTRY
    while data[at : at + 32] != b"\xff" * 32:
        flags, entries = struct.unpack_from("<II", data, at + 32)
        name = _hex(data[at : at + 32])
        at += _ENTRY * (1 + entries * (2 if flags & _VERIFICATION else 1))
        if flags & _METADATA:
            found[_hex(data[at : at + 32])] = name
            at += _ENTRY
    return found


def _hex(data: bytes) -> str:
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))

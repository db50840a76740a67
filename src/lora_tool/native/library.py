"""The compiled kernel: found next to this file, tested once, and called with addresses. `merge.c` says what it computes.

It exists if lora-tool was installed where a C compiler is. `LORA_TOOL_KERNEL` says whether it is used: `auto` (if
possible), `off`, `require`, or one of its levels.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from lora_tool.core.choices import TextEnum, wrong_value
from lora_tool.core.errors import ExecutionError, LoraToolError
from lora_tool.core.tensors import DType
from lora_tool.native.structures import Codes, KernelTerm

VARIABLE = "LORA_TOOL_KERNEL"
FILE = Path(__file__).with_name("kernel.so")
"""What `build_kernel.py` makes of `merge.c`."""
VERSION = 1
"""Of the functions in `merge.c`, and of the arithmetic that they define."""
TYPES = {DType.BF16: 0, DType.F16: 1, DType.F32: 2}
"""The types that it reads and writes."""
COMPARABLE = (DType.BF16, DType.F16)
"""Those of `Kernel.compare`."""
COMPARED = 1024
"""Elements of which `Kernel.compare` gives the largest error."""


@enum.unique
class KernelLevel(TextEnum):
    """A set of vector instructions. All give the same bits."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    AVX512 = "avx512"
    NEON = "neon"

    @property
    def number(self) -> int:
        return list(KernelLevel).index(self)


class Seen(NamedTuple):
    """What `Kernel.scan` saw, in bits of an element."""

    first: int
    largest: int
    """The largest of the bits under the mask."""
    differing: int
    """Those in which any element differs from the first."""


_FASTEST_FIRST = (KernelLevel.AVX512, KernelLevel.NEON, KernelLevel.AVX2, KernelLevel.SCALAR)
_OTHER_CHOICES = ("auto", "off", "require")


class Kernel(Struct, frozen=True, kw_only=True):
    """The kernel at one level. Calls release the interpreter lock and are safe from several threads."""

    level: KernelLevel
    rows: int
    columns: int
    """Of a tile: how wide the panels of left and right factors are."""
    library: Any

    def pack(
        self, packed: int, width: int, factor: int, dtype: DType, size: tuple[int, int], strides: tuple[int, int]
    ) -> None:
        """Lay out the factor of `size` (its rows or columns, its rank) and `strides`, in elements, for `merge`."""
        self.library.lora_tool_pack(packed, width, factor, TYPES[dtype], *size, *strides)

    def merge(
        self,
        source: int,
        source_type: DType,
        out: int,
        out_type: DType,
        size: tuple[int, int],
        terms: tuple[KernelTerm, ...],
    ) -> bool:
        """Write W + deltas, of `size` rows and columns, at `out`; return False where a result is NaN or infinite."""
        types = TYPES[source_type], TYPES[out_type]
        call, number = self.library.lora_tool_merge, self.level.number
        return not call(number, source, types[0], out, types[1], *size, *_listed(terms))

    def convert(self, source: int, source_type: DType, out: int, out_type: DType, count: int) -> bool:
        """Write `count` elements as another type at `out`; return False where one is NaN or infinite."""
        types = TYPES[source_type], TYPES[out_type]
        return not self.library.lora_tool_convert(self.level.number, source, types[0], out, types[1], count)

    def merge_codes(
        self, codes: Codes, out: int, out_type: DType, size: tuple[int, int], terms: tuple[KernelTerm, ...] = ()
    ) -> bool:
        """Write the numbers of the codes, `size` rows and columns, at `out`, with the deltas; returned as by `merge`."""
        call, number = self.library.lora_tool_merge_codes, self.level.number
        return not call(number, codes, out, TYPES[out_type], *size, *_listed(terms))

    def extremes(self, codes: Codes, numbers: int, size: tuple[int, int], low: int, high: int) -> None:
        """Lower the float32 at `low`, and raise those at `high`, to what the numbers of each scale reach."""
        self.library.lora_tool_extremes(self.level.number, codes, numbers, *size, low, high)

    def quantise(
        self, codes: Codes, out: int, numbers: int, size: tuple[int, int], *, divided: bool, least: float
    ) -> None:
        """Write float32 numbers as codes at `out`: divided by the scales or multiplied with them; int8 from `least`."""
        self.library.lora_tool_quantise(self.level.number, codes, out, numbers, *size, divided, least)

    def write(self, file: int, data: int, nbytes: int, offset: int, some: int) -> int:
        """Write bytes to a descriptor at `offset`, `some` at a time; return how many before the system refused more."""
        done: int = self.library.lora_tool_write(file, data, nbytes, offset, some)
        return done

    def pass_on(self, passage: int, terms: tuple[KernelTerm, ...]) -> int:
        """Write rows from file to file; return how many before something has to be done otherwise; see `passage_of`."""
        done: int = self.library.lora_tool_pass(self.level.number, passage, *_listed(terms))
        return done

    def scan(self, file: int, offset: int, nbytes: int, width: int, mask: int) -> Seen | None:
        """Return what elements of `width` bytes in a file are like; None where not all could be read."""
        seen = (ctypes.c_uint64 * 3)()
        done = self.library.lora_tool_scan(self.level.number, file, offset, nbytes, width, mask, seen)
        return Seen(*seen) if done else None

    def compare(
        self, elements: tuple[int, int], types: tuple[DType, DType], change: int, count: int, largest: int
    ) -> tuple[float, float, float, float]:
        """Return the sums of error², change², moved² and moved·change of elements, stored and of the base, and `change`.

        `count` is a multiple of eight. At `largest` is written what each `COMPARED` of them are off at most, float32, in
        half units in the last place.
        """
        totals = (ctypes.c_double * 4)()
        listed = (ctypes.c_void_p * 2)(*elements), (ctypes.c_int * 2)(*(TYPES[each] for each in types))
        self.library.lora_tool_compare(self.level.number, *listed, change, count, largest, totals)
        return totals[0], totals[1], totals[2], totals[3]

    def __str__(self) -> str:
        return f"kernel {VERSION} ({self.level})"


def _listed(terms: tuple[KernelTerm, ...]) -> tuple[Any, int]:
    """Return the terms as the kernel's functions take them, and how many they are."""
    return (KernelTerm * len(terms))(*terms), len(terms)


def kernel() -> Kernel | None:
    """Return the kernel that `LORA_TOOL_KERNEL` chooses, None if numpy is to compute.

    Raises `WrongValue` for an unknown value of `LORA_TOOL_KERNEL`, `ExecutionError` if this machine lacks the kernel or
    the level that it requires.
    """
    return asked_for(os.environ.get(VARIABLE) or "auto", FILE)


def any_kernel() -> Kernel | None:
    """Return the kernel for what is only read: None where `kernel` refuses the setting, which a merge reports."""
    with contextlib.suppress(LoraToolError):
        return kernel()
    return None


@lru_cache
def asked_for(choice: str, file: Path) -> Kernel | None:
    """Return the kernel in the library `file` that the value `choice` selects; see `kernel`."""
    word = choice.lower()
    if word not in (*_OTHER_CHOICES, *KernelLevel):
        raise wrong_value(VARIABLE, choice, [*_OTHER_CHOICES, *map(str, KernelLevel)])
    if word == "off":
        return None
    found, why_not = loaded(file)
    if word == "auto":
        return found[0] if found else None
    if why_not is not None:
        raise ExecutionError(
            f"{VARIABLE}={choice}, but the compiled kernel cannot be used: {why_not}",
            hint=f"install lora-tool again on a machine with a C compiler, or unset {VARIABLE} to compute with numpy",
        )
    if word == "require":
        return found[0]
    level = next((one for one in found if one.level == word), None)
    if level is None:
        has = ", ".join(str(one.level) for one in found)
        raise ExecutionError(
            f"{VARIABLE}={choice}: this processor supports {has}", hint=f"choose one of these, or unset {VARIABLE}"
        )
    return level


@lru_cache
def loaded(file: Path) -> tuple[tuple[Kernel, ...], str | None]:
    """Return the kernel at each level that this processor supports, the fastest first; or none, with the reason."""
    if not file.exists():
        return (), "it was not built when lora-tool was installed"
    try:
        library = _declared(ctypes.CDLL(str(file)))
        version = library.lora_tool_version()
    except (OSError, AttributeError) as error:
        return (), f"{file.name} cannot be loaded: {error}"
    if version != VERSION:
        return (), f"{file.name} has version {version}, but version {VERSION} is needed"
    if _is_stale(file):  # its structs may have another layout than ours
        return (), (
            f"{file.name} was compiled from other sources than those beside it: compile it again (`src/build_kernel.py`)"
        )
    found: list[Kernel] = []
    wrong: list[str] = []
    for level in _FASTEST_FIRST:
        if rows := library.lora_tool_rows(level.number):
            columns = library.lora_tool_columns(level.number)
            found.append(Kernel(level=level, rows=rows, columns=columns, library=library))
            wrong += [str(level)] if checksum(found[-1]) != CHECKSUM else []
    if wrong:
        return (), f"{file.name} gives wrong results at {', '.join(wrong)}; its compiler may be faulty"
    return tuple(found), None


def _is_stale(file: Path) -> bool:
    """Return whether the library was compiled from other sources than those in its folder."""
    digest, sources = 0, sorted(file.parent.glob("*.[ch]"))
    for path in sources:
        digest = zlib.crc32(path.read_bytes(), digest)
    with contextlib.suppress(OSError, AttributeError):
        return bool(sources) and sources_of(file) != f"{digest:08x}"
    return False


def sources_of(file: Path) -> str:
    """Return the CRC-32 of the sources that the library was compiled from, in hex. Raises OSError, AttributeError."""
    function = ctypes.CDLL(str(file)).lora_tool_sources  # only this one: an older library may lack others
    function.restype = ctypes.c_char_p
    sources: bytes = function()
    return sources.decode()


def _declared(library: Any) -> Any:  # noqa: ANN401 - ctypes gives functions by name
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.lora_tool_pack.argtypes = [pointer, size, pointer, number, size, size, size, size]
    library.lora_tool_pack.restype = None
    library.lora_tool_merge.argtypes = [number, pointer, number, pointer, number, size, size, pointer, size]
    library.lora_tool_convert.argtypes = [number, pointer, number, pointer, number, size]
    codes = ctypes.POINTER(Codes)
    library.lora_tool_merge_codes.argtypes = [number, codes, pointer, number, size, size, pointer, size]
    library.lora_tool_extremes.argtypes = [number, codes, pointer, size, size, pointer, pointer]
    library.lora_tool_quantise.argtypes = [number, codes, pointer, pointer, size, size, number, ctypes.c_float]
    library.lora_tool_write.argtypes = [number, pointer, size, size, size]
    library.lora_tool_pass.argtypes = [number, pointer, pointer, size]
    library.lora_tool_scan.argtypes = [number, number, size, size, number, ctypes.c_uint64, pointer]
    library.lora_tool_compare.argtypes = [number, pointer, pointer, pointer, size, pointer, pointer]
    library.lora_tool_compare.restype = None
    library.lora_tool_write.restype = library.lora_tool_pass.restype = size
    return library


_ROWS, _COLUMNS, _DEPTH = 13, 37, 5
_GROUP, _GROUPS = 12, 4
CHECKSUM = 2483084761
"""Of what `checksum` computes, by the definition in `merge.c`."""


def trial() -> tuple[list[float], list[float], list[int]]:
    """Return the left factor, the right factor and the bits of W, bfloat16, of the test that every kernel passes."""
    state, drawn = 1, []
    for _ in range(_DEPTH * (_ROWS + _COLUMNS) + _ROWS * _COLUMNS):
        state = (1664525 * state + 1013904223) % 2**32  # Numerical Recipes' quick generator
        drawn.append(state >> 8)
    factors = [(value - 2**23) / 2**24 for value in drawn[: _DEPTH * (_ROWS + _COLUMNS)]]
    # signs and fractions of all kinds, exponents from the subnormals of float16 to 2
    bits = [(value >> 8 & 0x807F) | (100 + value % 29) << 7 for value in drawn[len(factors) :]]
    return factors[: _DEPTH * _ROWS], factors[_DEPTH * _ROWS :], bits


def checksum(kernel: Kernel) -> int:
    """Return the CRC-32 of what the kernel makes of `trial`: of W + 0.3·(B·A) and W + B·A + 0.3·(B·A), stored as each type
    from each type; then of the bytes of W as codes: their numbers + 0.3·(B·A), and these as codes again; then of how far
    W is from itself, shifted, as each type.
    """
    b, a, bits = trial()
    at, total = ctypes.addressof, 0
    packed_b, packed_a = (ctypes.c_float * (64 * _DEPTH))(), (ctypes.c_float * (64 * _DEPTH))()
    left, right = (ctypes.c_float * len(b))(*b), (ctypes.c_float * len(a))(*a)
    kernel.pack(at(packed_b), kernel.rows, at(left), DType.F32, (_ROWS, _DEPTH), (_DEPTH, 1))
    kernel.pack(at(packed_a), kernel.columns, at(right), DType.F32, (_COLUMNS, _DEPTH), (1, _COLUMNS))
    scaled, plain = (KernelTerm(at(packed_b), at(packed_a), _DEPTH, scale) for scale in (0.3, 1.0))
    weights = (ctypes.c_uint16 * len(bits))(*bits)
    for source_type in TYPES:
        source = ctypes.create_string_buffer(4 * len(bits))
        kernel.convert(at(weights), DType.BF16, at(source), source_type, len(bits))
        for out_type in TYPES:
            for terms in (scaled,), (plain, scaled):
                out = ctypes.create_string_buffer(out_type.bits // 8 * len(bits))
                kernel.merge(at(source), source_type, at(out), out_type, (_ROWS, _COLUMNS), terms)
                total = zlib.crc32(out.raw, total)
    for kind in range(3):
        total = _with_codes(kernel, kind, bytes(weights)[: _ROWS * _COLUMNS], scaled, total)
    count = len(bits) // 8 * 8 - 8
    change = (ctypes.c_double * count)(*(b * (count // len(b) + 1))[:count])
    for types in (DType.BF16, DType.F16), (DType.F16, DType.BF16):
        most = ctypes.c_float()
        sums = kernel.compare((at(weights), at(weights) + 2), types, at(change), count, at(most))
        total = zlib.crc32(repr((*sums, most.value)).encode(), total)
    return total


def _with_codes(kernel: Kernel, kind: int, raw: bytes, term: KernelTerm, total: int) -> int:
    """Return the CRC-32 with the numbers that bytes are as codes of a kind, with ΔW, and these as codes of eight bits."""
    if kind == 0:  # the largest code of E4M3 is NaN
        raw = raw.replace(b"\x7f", b"\x7e").replace(b"\xff", b"\xfe")
    at, stored, size = ctypes.addressof, ctypes.create_string_buffer(raw, len(raw)), (_ROWS, _COLUMNS)
    scales = (ctypes.c_float * _GROUPS)(0.01, 0.02, 0.03, 0.04)
    table = (ctypes.c_float * 512)(*(list(range(-18, 19)) * 14)[:512])
    codes = Codes(
        bytes=at(stored),
        table=at(table),
        scales=at(scales),
        stride=_COLUMNS,
        apart=_GROUPS,
        group=_GROUP,
        tall=_ROWS,
        again=1.0,
        kind=kind,
        type=TYPES[DType.F32],
    )
    numbers, again = ctypes.create_string_buffer(4 * len(raw)), ctypes.create_string_buffer(len(raw))
    kernel.merge_codes(codes, at(numbers), DType.F32, size, (term,))
    total = zlib.crc32(numbers.raw, total)
    if kind == 2:  # noqa: PLR2004 - two codes in a byte are not written again
        return total
    kernel.quantise(codes, at(again), at(numbers), size, divided=kind == 0, least=-127.0)
    return zlib.crc32(again.raw, total)

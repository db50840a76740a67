"""The arguments of the compiled kernel, as `merge.c` lays them out."""

from __future__ import annotations

import ctypes


class KernelTerm(ctypes.Structure):
    """One term of a delta: the addresses of its packed factors, its rank and its scaling."""

    _fields_ = (
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
        ("scaling", ctypes.c_double),
    )

    def from_row(self, row: int) -> KernelTerm:
        """Return the term of rows that begin at `row`, where a panel of the left factor does."""
        begin = self.left + row * self.depth * ctypes.sizeof(ctypes.c_float)
        return KernelTerm(begin, self.right, self.depth, self.scaling)


class Codes(ctypes.Structure):
    """Rows of codes with their scales: `struct codes` of `merge.c`."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("apart", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("tall", ctypes.c_int64),
        ("above", ctypes.c_int64),
        ("again", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class Storing(ctypes.Structure):
    """Where merged numbers are stored as codes again: `struct storing` of `requantise.h`."""

    _fields_ = (
        ("raised", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("meant", ctypes.c_void_p),
        ("kept", ctypes.c_int64),
        ("panel", ctypes.c_int64),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
        ("scale_type", ctypes.c_int32),
        ("divided", ctypes.c_int32),
    )


class Passage(ctypes.Structure):
    """Rows that go from file to file: `struct passage` of `files.h`."""

    _fields_ = (
        ("begin", ctypes.c_int64),
        ("to", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("some", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("made", ctypes.c_void_p),
        ("codes", ctypes.POINTER(Codes)),
        ("storing", ctypes.POINTER(Storing)),
        ("source", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("source_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )

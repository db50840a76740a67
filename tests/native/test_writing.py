"""Writing of the kernel: all bytes in their place, in large writes and in the small ones that follow one that took long."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

import pytest

import build_kernel
from lora_tool.native.library import Kernel
from lora_tool.native.rows import WRITE_BYTES

HEAD = b"header"
NBYTES = 3 * WRITE_BYTES + 5


def writes() -> int:
    """Return how many writes this process has asked the system for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("syscw:")).split()[1])


def test_all_bytes_are_written_in_their_place(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    data = os.urandom(NBYTES)
    held = ctypes.create_string_buffer(data, NBYTES)
    address = ctypes.addressof(held)
    path = tmp_path / "weights"
    path.write_bytes(HEAD)
    with path.open("r+b") as file:
        for most in (WRITE_BYTES, 1000):
            assert kernels[0].write(file.fileno(), address, NBYTES, len(HEAD), most) == NBYTES
            assert path.read_bytes() == HEAD + data
    assert kernels[0].write(-1, address, NBYTES, 0, WRITE_BYTES) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc counts the writes")
def test_small_writes_follow_one_that_took_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    assert compiler
    sources = shutil.copytree(build_kernel.NATIVE, tmp_path / "native")
    text = (sources / "files.h").read_text()
    assert "#define SLOW 1 " in text
    (sources / "files.h").write_text(text.replace("#define SLOW 1 ", "#define SLOW -1 "))  # as if each did
    monkeypatch.setattr(build_kernel, "NATIVE", sources)
    build_kernel.compile_kernel(tmp_path / "kernel.so", "-O0")
    write = ctypes.CDLL(str(tmp_path / "kernel.so")).lora_tool_write
    write.argtypes = [ctypes.c_int, ctypes.c_char_p, *[ctypes.c_int64] * 3]
    write.restype = ctypes.c_int64
    data = os.urandom(NBYTES)
    with (tmp_path / "weights").open("w+b") as file:
        before = writes()
        assert write(file.fileno(), data, NBYTES, 0, WRITE_BYTES) == NBYTES
        least = 1 + 2 * WRITE_BYTES // (1 << 16) + 1
        assert least <= writes() - before < 2 * least  # other threads may write something
    assert (tmp_path / "weights").read_bytes() == data

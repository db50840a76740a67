"""Compile lora-tool's kernel: a hook of the build, which falls back to numpy, and a command for a working copy.

`python src/build_kernel.py` compiles it in place with the C compiler that CC names, by default `cc`. `LORA_TOOL_KERNEL`
says what happens without a compiler: `auto` builds without the kernel, `require` fails, `off` never compiles it.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent / "lora_tool"
NATIVE = PACKAGE / "native"
LIBRARY = NATIVE / "kernel.so"
# CFLAGS are not asked: -ffast-math among them would change results. No multiplication and addition are made one where
# the source has two
FLAGS = ("-std=c11", "-O2", "-ftree-vectorize", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")


class CannotCompileError(Exception):
    """The kernel cannot be compiled. The message names the missing compiler, or holds what the compiler printed."""


def sources_digest() -> str:
    """Return the CRC-32 of the kernel's sources, in hex; it is compiled into the library, and checked at each start."""
    digest = 0
    for path in sorted(NATIVE.glob("*.[ch]")):
        digest = zlib.crc32(path.read_bytes(), digest)
    return f"{digest:08x}"


def compile_kernel(library: Path = LIBRARY, *flags: str) -> None:
    """Write the kernel, whole or not at all. Raises `CannotCompileError`."""
    source, digest = NATIVE / "merge.c", f'-DLORA_TOOL_SOURCES="{sources_digest()}"'
    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *FLAGS, *flags, digest, "-o", str(made), str(source), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's compiler
        except OSError as error:
            raise CannotCompileError(f"{compiler[0]}: {error.strerror}") from error
        if done.returncode != 0 or not made.exists():
            raise CannotCompileError(f"{shlex.join(command)}\n{done.stderr or 'the compiler wrote no library'}")
        made.replace(library)


def build(asked: str) -> str | None:
    """Compile or remove the kernel as LORA_TOOL_KERNEL asks; return why there is none, None if it was compiled.

    Raises `CannotCompileError` where it is required.
    """
    LIBRARY.unlink(missing_ok=True)
    if asked == "off":
        return "LORA_TOOL_KERNEL=off"
    try:
        compile_kernel()
    except CannotCompileError as error:
        if asked == "require":
            raise CannotCompileError(f"LORA_TOOL_KERNEL=require, but the kernel cannot be compiled: {error}") from error
        return str(error)
    return None


def wheel_tag() -> str:
    """Return the tag of a wheel with the library: any Python 3 on this platform."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return f"py3-none-{re.sub('[^a-zA-Z0-9]', '_', name)}"


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a command, where nothing is built for installing
    pass
else:

    class KernelHook(BuildHookInterface[Any]):  # type: ignore[misc] # hatchling is there only where wheels are built
        """Hatchling calls it before it makes a wheel, editable wheels included."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile the kernel and mark the wheel as one for this platform, or warn that it will compute with numpy."""
            del version
            if self.target_name != "wheel":
                return
            why_not = build(os.environ.get("LORA_TOOL_KERNEL", "auto").lower())
            if why_not is not None:
                self.app.display_warning(
                    f"lora-tool is built without its compiled kernel and will compute with numpy: {why_not}"
                )
                return
            build_data["pure_python"] = False
            build_data["tag"] = wheel_tag()
            build_data["artifacts"].append(str(LIBRARY.relative_to(Path(self.root))))


if __name__ == "__main__":
    sys.exit(build("require"))

"""The kernel as a program of its own: under emulators of other processors, and under the compiler's sanitizers."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import build_kernel
from lora_tool.core.tensors import DType
from lora_tool.execution.kernels import STORAGE
from lora_tool.formats.quantised.arrays import STORED
from lora_tool.formats.quantised.coded import Code
from lora_tool.formats.quantised.requantising import Rounding
from lora_tool.native.library import TYPES, Kernel, KernelLevel
from tests.native.cases import KINDS, Array, Case, assert_right, drawn_case
from tests.native.coded_cases import CodedCase, drawn, weight_of

DRIVER = Path(__file__).with_name("driver.c")
FLAGS = [flag for flag in build_kernel.FLAGS if flag not in ("-shared", "-fPIC")]
X86 = platform.machine() in ("x86_64", "AMD64")


def cases() -> list[Case | CodedCase]:
    """Return a few of every kind and type, with sizes around those of a tile."""
    rng = np.random.default_rng(0)
    types = list(TYPES)
    found = []
    for number in range(60):
        source, factor, out = (types[int(rng.integers(3))] for _ in range(3))
        size = int(rng.integers(1, 27)), int(rng.integers(1, 67))
        ranks = tuple(int(rank) for rank in rng.integers(0, 9, int(rng.integers(0, 4))))
        found.append(drawn_case(number, size=size, ranks=ranks, kind=KINDS[number % 5], types=(source, factor, out)))
    deep = drawn_case(1, size=(25, 600), ranks=(300,), kind="plain", types=(DType.BF16, DType.BF16, DType.BF16))
    coded = [
        drawn(number, list(Code)[number % 3], 1 + number % 27, 1 + 37 * number % 1100, 1 + number % 19)
        for number in range(45)
    ]
    return [*found, deep, *coded]


def compile_driver(folder: Path, compiler: Sequence[str], *flags: str) -> Path:
    """Return the driver as a program for whatever the compiler is for."""
    program = folder / "driver"
    command = [*compiler, *FLAGS, *flags, f"-I{build_kernel.NATIVE}", "-Wall", "-Wextra", "-Werror", str(DRIVER)]
    done = subprocess.run([*command, "-o", str(program), "-lm"], capture_output=True, text=True, check=False)
    if "sanitize" in done.stderr and "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no libraries of its sanitizers: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


def check(command: Sequence[str], level: KernelLevel) -> None:
    """Run every case, and compare what the program writes with the definition."""
    all_cases = cases()
    done = subprocess.run(
        command, input=b"".join(case.written(level) for case in all_cases), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    at = 0
    for case in all_cases:
        plain = case.merged() if isinstance(case, CodedCase) else case
        flagged, storage = done.stdout[at], STORAGE[case.out_type]
        end = at + 1 + plain.source.size * storage.itemsize
        found = np.frombuffer(done.stdout[at + 1 : end], storage).reshape(plain.source.shape)
        assert_right(plain, found, flagged == 0)
        at = end
        if isinstance(case, CodedCase):
            expected = requantised(case, found.astype(np.float32)) if case.out_type is DType.F32 else b""
            assert done.stdout[at : at + len(expected)] == expected
            at += len(expected)
            if (again := stored_again(case)) is not None:
                wrong, made = again
                assert done.stdout[at] == wrong
                assert wrong or done.stdout[at + 1 : at + 1 + len(made)] == made
                at += 1 + len(made)
    assert at == len(done.stdout)


def requantised(case: CodedCase, numbers: Array) -> bytes:
    """Return the extremes of the numbers of each scale, and the codes that they are with the case's scales."""
    part = case.part
    if part.table.code is Code.HALVES:
        return b""
    dtype = DType.I8 if part.table.code is Code.INT8 else DType.F8_E4M3
    rows, columns = numbers.shape
    # the rows above the first are there, and have no numbers
    encoding = weight_of(part.above + rows, columns, (part.tall, part.group), dtype)
    of = 0, len(part.scales)
    low, high = Rounding().extremes(encoding, numbers, part.above, of)
    codes = Rounding()._codes
    made = np.empty(numbers.shape, STORED[dtype])
    with np.errstate(all="ignore"):
        codes(encoding, numbers.copy(), part.scales, (part.above, 0), made)
    return low.tobytes() + high.tobytes() + made.tobytes()


def stored_again(case: CodedCase) -> tuple[bool, bytes] | None:
    """Return what one call makes of W and its deltas: whether a number is not finite; scales, codes, the first numbers.

    The type of scales, and whether numbers are divided by them, are drawn by the width, as in `driver.c`.
    """
    part = replace(case.part, above=0)
    if part.table.code is Code.HALVES or case.out_type is not DType.F32 or not case.terms or part.group == 1:
        return None
    values, finite = dataclasses.replace(case, part=part).merged().expected()
    rows, columns = values.shape
    of_floats = part.table.code is Code.E4M3
    divided = of_floats or columns % 2 == 1
    least, most = (-448, 448) if of_floats else (-128 if divided else -127, 127)
    down, across = range(0, rows, part.tall), range(0, columns, part.group)
    low, high = (of.reduceat(of.reduceat(values, down, axis=0), across, axis=1) for of in (np.minimum, np.maximum))
    scales = part.scales[: len(down)]
    with np.errstate(all="ignore"):
        room = np.abs(scales * part.again)
        needed = np.maximum(high / np.float32(most), low / np.float32(least)) if divided else np.maximum(high, -low)
        too_far = (high > np.float32(most) * room) | (low < np.float32(least) * room)
        scales = np.where(too_far, as_scales(needed, columns % 4), scales)
        factors = np.where(scales == 0, np.float32(1), scales)
        wide = factors.repeat(part.tall, axis=0)[:rows].repeat(part.group, axis=1)[:, :columns]
        ratios = (values / wide if divided else values * (np.float32(127) / wide)).clip(least, most)
        codes = ratios.astype(STORED[DType.F8_E4M3]) if of_floats else np.rint(ratios).astype(np.int8)
    return not finite, scales.tobytes() + codes.tobytes() + values[:2].tobytes()


def as_scales(needed: Array, kind: int) -> Array:
    """Return numbers in the type of scales: an `enum type` of `merge.c`, or the next powers of two."""
    if kind < len(TYPES):
        return needed.astype(STORAGE[list(TYPES)[kind]]).astype(np.float32)
    return np.asarray(np.exp2(np.ceil(np.log2(needed.astype(np.float64))).clip(-127, 127)).astype(np.float32))


def program(*names: str) -> str:
    """Return the first of these programs that is there, or skip."""
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        pytest.skip(f"not installed: {' or '.join(names)}")
    return found


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command that runs the driver as a program of 64-bit ARM."""
    compiler, emulator = program("aarch64-linux-gnu-gcc"), program("qemu-aarch64", "qemu-aarch64-static")
    return [emulator, str(compile_driver(tmp_path_factory.mktemp("arm"), [compiler], "-static"))]


@pytest.mark.parametrize("level", [KernelLevel.NEON, KernelLevel.SCALAR], ids=str)
def test_arm_has_the_same_bits(on_arm: list[str], level: KernelLevel) -> None:
    check(on_arm, level)


@pytest.mark.skipif(not X86, reason="for x86-64")
@pytest.mark.parametrize(
    ("processor", "level"), [("Nehalem", KernelLevel.SCALAR), ("Haswell", KernelLevel.AVX2)], ids=str
)
def test_older_processors_have_the_same_bits(tmp_path: Path, compiler: str, processor: str, level: KernelLevel) -> None:
    emulator = program("qemu-x86_64", "qemu-x86_64-static")
    check([emulator, "-cpu", processor, str(compile_driver(tmp_path, shlex.split(compiler), "-static"))], level)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Path:
    """Return the driver with the compiler's checks of memory and of undefined behaviour."""
    flags = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return compile_driver(tmp_path_factory.mktemp("sanitized"), shlex.split(compiler), *flags)


def test_sanitizers_find_nothing(sanitized: Path, kernels: tuple[Kernel, ...]) -> None:
    for kernel in kernels:
        check([str(sanitized)], kernel.level)


def test_sanitizers_would_find_a_buffer_that_is_too_small(sanitized: Path, kernels: tuple[Kernel, ...]) -> None:
    case = drawn_case(0, size=(3, 5), ranks=(2,), kind="plain", types=(DType.F32, DType.F32, DType.F32))
    ((left, right, scaling),) = case.terms
    object.__setattr__(left, "memory", left.memory[: left.begin + 1])  # the driver is told of less than it is to read
    case = Case(case.source, case.source_type, case.out_type, ((left, right, scaling),))
    done = subprocess.run(
        [str(sanitized)], input=case.written(kernels[-1].level), capture_output=True, check=False, env=os.environ
    )
    assert done.returncode != 0
    assert b"heap-buffer-overflow" in done.stderr

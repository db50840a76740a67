"""The compiled comparison of `verify`: what it sees is what numpy sees, of every type, and a broken one is not used."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

import build_kernel
from lora_tool.tensors import DType
from lora_tool.verification import counting
from lora_tool.verification.elements import FLOATS
from lora_tool.verification.native import copies, library
from lora_tool.verification.native.library import Comparison
from lora_tool.verification.recompute import Recomputed
from tests.native.conftest import Wrong

DRIVER = Path(__file__).with_name("compare_driver.c")
SIZES = [(0, 5), (1, 1), (3, 7), (31, 33), (5, 700)]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Comparison:
    """Return the comparison, compiled from these sources."""
    assert compiler
    made = tmp_path_factory.mktemp("comparison") / "compare.so"
    build_kernel.compile_comparison(made)
    found = library.loaded(made)
    assert found is not None
    return found


def bits_of(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Return float64 values stored as the type, about to nearest."""
    if dtype is DType.BF16:
        return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return values.astype({DType.F16: "<f2", DType.F32: "<f4", DType.F64: "<f8"}[dtype]).view(FLOATS[dtype].bits)


def never(_rows: np.ndarray, _columns: np.ndarray) -> np.ndarray:
    raise AssertionError("asked only where a value is outside")


@pytest.mark.parametrize("base", list(FLOATS), ids=str)
@pytest.mark.parametrize("stored", list(FLOATS), ids=str)
@pytest.mark.parametrize("within", [0.0, 1.0, 1e9])
def test_it_sees_what_numpy_sees(comparison: Comparison, stored: DType, base: DType, within: float) -> None:
    wide = np.dtype(np.float32 if stored.bits == 16 else np.float64)
    for number, size in enumerate(SIZES):
        rng = np.random.default_rng([number, stored.bits, base.bits])
        sizes = 10.0 ** rng.integers(-6, 2, size)  # from the subnormal numbers of float16 on
        weights, change = rng.standard_normal(size) * sizes, rng.standard_normal(size) * sizes * 1e-2
        written = weights + change
        for each in weights, change, written:
            each[rng.random(size) < 0.02] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0])
        with np.errstate(all="ignore"):
            raw = bits_of(written, stored).reshape(-1).view(np.uint8)
            expected = Recomputed(bits_of(weights, base), change, never, stored=base)
            seen = counting._seen_by(comparison, raw, stored, expected, within, wide)
            known, places = counting._seen_by_numpy(raw, stored, expected.widened(wide), within)
        if len(places) > library.LISTED:
            assert seen is None
            continue
        assert seen is not None
        assert list(seen[1]) == list(places)
        for field in ("compared", "ulps", "moved"):
            assert getattr(seen[0], field) == getattr(known, field), field
        for field in ("error_squares", "change_squares", "moved_squares", "dot"):
            assert getattr(seen[0], field) == pytest.approx(getattr(known, field), rel=1e-4, nan_ok=True), field


def test_a_change_alone_is_told_from_the_base(comparison: Comparison) -> None:
    raw = np.full(2000, 0x3F80, np.uint16)
    for moved in (False, True):
        raw[-1] = 0x3F81 if moved else 0x3F80
        expected = Recomputed(np.ones((40, 50), np.float32), np.zeros((40, 50), np.float32), never)
        seen = counting._seen_by(comparison, raw.view(np.uint8), DType.BF16, expected, 2.0, np.dtype(np.float32))
        assert seen is not None
        assert seen[0].moved is moved


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("#define VERSION 3", "#define VERSION 99"),
        ("& EXPONENT) * unit;", "& EXPONENT) * (2 * unit);"),
        ("most <= bound", "1"),
        ("= done + at;", "= at + 1;"),
        ("changes += by * by;", "changes += by;"),
    ],
    ids=["another version", "half of the error", "sees nothing", "another place", "other sums"],
)
def test_a_comparison_that_is_wrong_is_not_used(wrongly_compiled: Wrong) -> None:
    assert library.loaded(wrongly_compiled("COMPARING", "compare.c", build_kernel.compile_comparison)) is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("#define VERSION 3", "#define VERSION 99"),
        ("if (memcmp(stored, source, (size_t)count) == 0)", "if (1)"),
        ("if (one != other)", "if (0)"),
        ("copy->differing++ ? least_of(copy->first, byte) : byte", "byte + 0 * copy->differing++"),
        ("top * columns + column < first", "0"),
        ("bottom * columns + column >= last", "0"),
        ("copy->from + column * line", "copy->from + column * piece"),
    ],
    ids=["another version", "plain", "transposed", "the last", "the first row", "the last row", "lines"],
)
def test_a_comparison_of_copies_that_is_wrong_is_not_used(wrongly_compiled: Wrong) -> None:
    assert copies.loaded(wrongly_compiled("COMPARING", "compare.c", build_kernel.compile_comparison)) is None


def test_numpy_compares_where_it_is_not_built_and_where_the_kernel_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn.so").write_bytes(b"\x7fELF")
    for of in library, copies:
        assert of.loaded(tmp_path / "compare.so") is None
        assert of.loaded(tmp_path / "torn.so") is None
    monkeypatch.setenv("LORA_TOOL_KERNEL", "off")
    assert library.comparison() is None
    assert copies.copy_comparison() is None


def test_sanitizers_find_nothing(tmp_path: Path, compiler: str) -> None:
    program = tmp_path / "driver"
    flags = [flag for flag in build_kernel.FLAGS if flag not in ("-shared", "-fPIC")]
    checks = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
    command = [*shlex.split(compiler), *flags, *checks, f"-I{build_kernel.COMPARING}", str(DRIVER), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "sanitize" in done.stderr and "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no libraries of its sanitizers: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert all(int(line) > 0 for line in ran.stdout.splitlines())

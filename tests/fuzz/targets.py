"""What is fuzzed: each target takes bytes, and fails with anything but the errors that the project documents."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.fuzz.choices import Choices
from tests.fuzz.commands import must_hold
from tests.fuzz.injuries import injure

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _pair(root: Path) -> Sequence[Sequence[str | Path]]:
    adapter, base, out = root / "adapter", root / "base", root / "out"
    return (
        ("validate", adapter, "--base", base, "--json", "--deep"),
        ("validate", base, "--deep"),
        ("inspect", adapter, "--json"),
        ("inspect", adapter),
        ("inspect", base),
        ("merge", adapter, "--base", base, "-o", out, "--dry-run"),
        ("merge", adapter, "--base", base, "-o", out, "--dry-run", "--json"),
    )


def _sharded(root: Path) -> Sequence[Sequence[str | Path]]:
    out = root.parent / "out"
    return (
        ("validate", root, "--json"),
        ("validate", root),
        ("inspect", root),
        ("consolidate", root, "-o", out, "--dry-run"),
        ("consolidate", root, "-o", out, "--dry-run", "--what", "state", "--json"),
    )


def _run_folder(root: Path) -> Sequence[Sequence[str | Path]]:
    return (
        ("validate", root, "--json"),
        ("inspect", root),
        ("inspect", root / "checkpoint-2", "--json"),
    )


FOLDERS: Mapping[str, Callable[[Path], Sequence[Sequence[str | Path]]]] = {
    "causal-llama": _pair,
    "reward-qwen2": _pair,
    "reward-run": _run_folder,
    "fsdp2-reward": _sharded,
    "zero/stage1-reward": _sharded,
    "zero/stage2-tied": _sharded,
    "zero/stage3-reward": _sharded,
    "zero/stage3-saved": _sharded,
}


def folders(data: bytes) -> None:
    """Injure a fixture once to three times, and run one command on it."""
    choices = Choices(data)
    name = choices.pick(list(FOLDERS))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "root"
        shutil.copytree(FIXTURES / name, root)
        done = [injure(root, choices) for _ in range(1 + choices.below(3))]
        arguments = choices.pick(FOLDERS[name](root))
        try:
            must_hold(arguments)
        except BaseException as error:
            error.add_note(f"{name}: {'; '.join(done)}: {' '.join(map(str, arguments))}")
            raise

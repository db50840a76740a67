"""The same disease has the same code wherever it sits: in a checkpoint, a run, a torch file, the Hub's cache."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from lora_tool.core.report import Severity
from tests.checkpoint_edits import WEIGHTS, Raw, read
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, MUTATIONS, REWARD, SHARDED, Mutation, break_, copy_of

_TRAINER = FIXTURES / "reward-run" / "checkpoint-2"
_ADAPTERS = ("LT1", "LT2", "LT3", "LT5")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}


def _as_checkpoint(folder: Path) -> Path:
    """Give it what the HF Trainer writes beside the weights."""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        if not (folder / name).exists():
            shutil.copy(_TRAINER / name, folder / name)
    return folder


def _in_a_run(folder: Path) -> Path:
    run = folder.parent / "run"
    run.mkdir()
    shutil.copytree(_as_checkpoint(folder), run / "checkpoint-2", symlinks=True)
    return run


def _with_deepspeed(folder: Path) -> Path:
    shutil.copytree(FIXTURES / "zero" / "stage2-reward" / "global_step2", folder / "global_step2", dirs_exist_ok=True)
    (folder / "latest").write_text("global_step2")
    return folder


def _in_the_cache(folder: Path) -> Path:
    """Make each file a link into `blobs`, as huggingface_hub does."""
    repo = folder.parent / "models--acme--model"
    snapshot = repo / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for at, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, repo / "blobs" / f"{at:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{at:040x}")
    return snapshot


def _as_torch_file(folder: Path) -> Path:
    table = {name: _tensor(stored) for name, stored in read(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    torch.save(table, folder / "adapter_model.bin")
    return folder


def _tensor(stored: Raw) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(stored.data), dtype=_DTYPES[stored.dtype]) if stored.data else torch.zeros(0)
    return flat.reshape(stored.shape)


PLACES: Mapping[str, Callable[[Path], Path]] = {
    "trainer checkpoint": _as_checkpoint,
    "run": _in_a_run,
    "beside DeepSpeed's files": _with_deepspeed,
    "Hub cache": _in_the_cache,
    "torch file": _as_torch_file,
}


def _fits(mutation: Mutation, place: str) -> bool:
    if place in ("torch file", "beside DeepSpeed's files") and mutation.of not in (CAUSAL, REWARD):
        return False
    if place == "Hub cache":
        # a link is what LT112 is about, and nothing lies beside a snapshot, where LT521 looks
        return mutation.code not in ("LT112", "LT521", "LT7") and "run" not in mutation.of
    if place == "torch file":  # its own container has its own defects
        return not mutation.code.startswith("LT1")
    return mutation.of in (CAUSAL, REWARD, SHARDED)


def _cases() -> Iterator[tuple[str, str]]:
    """Yield each code in one place: of those that it fits, where fewest of its hundred are.

    That each injury gives its code where it is made is shown in test_rules_mutations.py.
    """
    first = {each.code: name for name, each in reversed(MUTATIONS.items()) if each.code[:3] in _ADAPTERS}
    met = Counter[tuple[str, str]]()
    for code, name in first.items():
        fitting = [(met[code[:3], place], place) for place in PLACES if _fits(MUTATIONS[name], place)]
        if fitting:
            _, place = min(fitting)
            met[code[:3], place] += 1
            yield name, place


CASES = tuple(_cases())


@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_code_is_the_same(name: str, place: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    folder = copy_of(mutation.of, tmp_path)
    base = folder.parent / "base" if mutation.with_base else None
    break_(folder, name)
    report = judge(PLACES[place](folder), base=base, **mutation.options)
    level = Severity.INFO if mutation.quiet else Severity.WARNING
    assert mutation.code in codes(report, level), lines(report, Severity.INFO)


def test_each_hundred_of_codes_is_met_in_each_place() -> None:
    met = {(name[:3], place) for name, place in CASES}
    assert met >= {(hundred, place) for hundred in _ADAPTERS[1:] for place in PLACES}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("of", [CAUSAL, REWARD])
def test_a_good_adapter_is_silent_there(of: str, place: str, tmp_path: Path) -> None:
    report = judge(PLACES[place](copy_of(of, tmp_path)))
    # a run of one checkpoint is unfinished, and a torch file is a pickle: both are said
    assert [line for line in lines(report) if " LT110 " not in line and " LT705 " not in line] == []

"""`merge --each`: what it writes of each adapter is what a merge of its own writes, whatever becomes of the others."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool import MergedOne, merge, merge_each
from lora_tool.checkpoints import ModelDir, open_model
from lora_tool.core.errors import ExecutionError, WrongValue
from lora_tool.core.progress import Progress
from lora_tool.plans.merge.options import MergeArguments
from lora_tool.workflows import caller
from lora_tool.workflows import merge_each as workflow
from lora_tool.workflows.merge_each import names_of
from tests.cli.calling import Caller
from tests.oracle.peft_merge import save_adapter, save_base

CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "q-v": {"r": 6, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "head": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"r": 4, "target_modules": ["embed_tokens", "o_proj"]},
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    save_base(folder / "base", "llama", "causal-lm", torch.bfloat16)
    for name, config in CONFIGS.items():
        save_adapter(folder / name, folder / "base", "causal-lm", config)
    spoiled = shutil.copytree(folder / "linear", folder / "spoiled") / "adapter_model.safetensors"
    tensors = load_file(spoiled)
    name = next(name for name in tensors if "layers.1" in name and "lora_B" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, spoiled)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "options", [{"max_shard_size": 20_000, "jobs": 2}, {"precision": "peft"}, {"dtype": "float32"}]
)
def test_each_folder_is_what_a_merge_of_its_own_writes(sweep: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    done = merge_each([sweep / name for name in CONFIGS], out=tmp_path / "all", base=sweep / "base", **options)
    assert [(one.name, one.error) for one in done] == [(name, None) for name in CONFIGS]
    for name in CONFIGS:
        alone = merge(sweep / name, out=tmp_path / name, base=sweep / "base", **options)
        assert content(tmp_path / "all" / name) == content(alone.path)
    assert {path.name for path in (tmp_path / "all").iterdir()} == set(CONFIGS)


def test_one_that_fails_while_it_is_written_stops_no_other(sweep: Path, tmp_path: Path) -> None:
    names = ["linear", "spoiled", "q-v"]
    done = merge_each([sweep / name for name in names], out=tmp_path / "all", base=sweep / "base", ignore=["LT209"])
    assert [one.passed for one in done] == [True, False, True]
    assert isinstance(done[1].error, ExecutionError)
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"linear", "q-v"}
    alone = merge(sweep / "q-v", out=tmp_path / "alone", base=sweep / "base", ignore=["LT209"])
    assert content(tmp_path / "all" / "q-v") == content(alone.path)


def test_the_base_that_all_of_them_name_is_opened_once(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def counted(path: Path) -> ModelDir:
        opened.append(path)
        return open_model(path)

    monkeypatch.setattr("lora_tool.workflows.merge_each.opened_model", counted)
    done = merge_each([sweep / "linear", sweep / "q-v"], out=tmp_path / "all")
    assert all(one.passed for one in done)
    assert opened == [sweep / "base"]


def interrupted_after(nbytes: int) -> Callable[[str, int], contextlib.AbstractContextManager[Progress]]:
    """Return a watch that interrupts once so many bytes are written in all."""
    left = [nbytes]

    @contextlib.contextmanager
    def watch(_what: str, _nbytes: int) -> Iterator[Progress]:
        def progress(written: int) -> None:
            left[0] -= written
            if left[0] < 0:
                raise KeyboardInterrupt

        yield progress

    return watch


@pytest.mark.parametrize("resume", [False, True])
def test_an_interrupt_leaves_whole_folders_alone(sweep: Path, tmp_path: Path, resume: bool) -> None:
    names = ["linear", "q-v", "dora", "head"]
    adapters = [sweep / name for name in names]
    size = merge(adapters[0], out=tmp_path / "alone", base=sweep / "base").plan.data_bytes
    asked = MergeArguments(
        out=tmp_path / "all", base=sweep / "base", resume=resume, jobs=1, max_shard_size=20_000, ignore=()
    )
    ended: list[MergedOne] = []
    with pytest.raises(KeyboardInterrupt):
        workflow.merge_each(adapters, asked, caller.Caller(progress=interrupted_after(5 * size // 2)), ended.append)
    assert [one.name for one in ended] == ["linear", "q-v"]
    left = {path.name for path in (tmp_path / "all").iterdir()}
    hidden = {".dora.lora-tool-partial"} if resume else set()
    assert left == {"linear", "q-v"} | hidden
    if resume:
        done = workflow.merge_each(adapters, asked)
        assert [(one.passed, one.finished_before) for one in done] == [(True, name in names[:2]) for name in names]
        for one in done:
            alone = merge(sweep / one.name, out=tmp_path / one.name, base=sweep / "base", max_shard_size=20_000)
            assert content(one.path) == content(alone.path)


def test_names_say_which_adapter_it_is(tmp_path: Path) -> None:
    adapters = [tmp_path / "a" / "checkpoint-500", tmp_path / "b" / "checkpoint-500", tmp_path / "last"]
    for each in adapters:
        each.mkdir(parents=True)
    assert names_of(adapters) == ["a-checkpoint-500", "b-checkpoint-500", "last"]
    assert names_of(["owner/name@v2", "other/name"]) == ["name-v2", "name"]
    with pytest.raises(WrongValue, match="given twice"):
        names_of([adapters[0], str(adapters[0])])
    with pytest.raises(WrongValue, match=r"weight 0\.7"):
        names_of([f"{adapters[0]}=0.7"])


def test_the_command_says_what_became_of_each(sweep: Path, tmp_path: Path, call: Caller) -> None:
    out = tmp_path / "all"
    typed = ("merge", sweep / "linear", sweep / "absent", "--base", sweep / "base", "--each", "-o", out)
    planned = call(*typed, "--dry-run")
    assert planned.code == 3
    assert "would write 1 of 2" in planned.out
    assert not out.exists()
    called = call(*typed)
    assert called.code == 3
    rows = [line.split() for line in called.out.splitlines()]
    assert [row[:2] for row in rows[1:3]] == [["linear", "verified"], ["absent", "refused"]]
    assert "absent" in called.err
    again = call(*typed, "--json")
    assert again.code == 6  # the worst: it exists already
    listed = again.json["outputs"]
    assert [(one["name"], one["passed"], one["exit_code"]) for one in listed] == [
        ("linear", False, 6),
        ("absent", False, 3),
    ]
    assert "--overwrite" in listed[0]["error"]["hint"]
    assert call(*typed, "--overwrite", "--quiet").code == 3


def test_of_a_run_one_adapter_is_taken_and_the_command_says_which(sweep: Path, tmp_path: Path, call: Caller) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(sweep / "linear", runs / "ended")
    for folder in (runs / "ended", runs / "under-way"):
        shutil.copytree(sweep / "q-v", folder / "checkpoint-2")
    shutil.copytree(sweep / "q-v", runs / "named" / "reward")
    typed = [runs / name for name in ("ended", "under-way", "named")]
    planned = call("merge", *typed, "--base", sweep / "base", "--each", "-o", tmp_path / "all", "--dry-run", "--json")
    assert [one["exit_code"] for one in planned.json["outputs"]] == [0, 3, 0]
    ended, under_way, _ = planned.json["outputs"]
    assert any(str(runs / "ended") in note and "checkpoint" not in note for note in ended["plan"]["notes"])
    assert f"lora-tool merge {runs / 'under-way' / 'checkpoint-2'}" in under_way["error"]["hint"]
    assert f"named: merging the adapter in {runs / 'named' / 'reward'}" in planned.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("A=0.7", "--each", "-o", "out"), "A=0.7"),
        (("A", "B", "--each"), "-o OUT"),
        (("A", "--each", "-o", "out", "--part", "1/2"), "--part"),
    ],
)
def test_what_contradicts_each_is_a_usage_error(arguments: tuple[str, ...], says: str, call: Caller) -> None:
    called = call("merge", *arguments)
    assert called.code == 2
    assert says in called.err
    assert "each" in called.err

"""Each rule sees the injury that it is for, and nothing else sees it; the good folders are silent."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from lora_tool import verify
from lora_tool.checkpoints import open_checkpoint
from lora_tool.core.report import Report, Severity
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, MODEL, MUTATIONS, REWARD, RUN, SHARDED, Mutation, break_, copy_of
from tests.typed import commands_in, type_it


def _judged(folder: Path, mutation: Mutation) -> Report:
    if mutation.verified:
        return verify(folder, **mutation.options).report
    base = folder.parent / "base" if mutation.with_base else None
    if base is None and folder.name == "adapter":
        shutil.rmtree(folder.parent / "base")  # else it would be found beside the adapter
    if mutation.with_base and folder.name == "merged":
        adapter = open_checkpoint(folder.parent / "adapter")
        return judge(folder, base=base, **{"adapters": [adapter], **mutation.options})
    return judge(folder, base=base, **mutation.options)


@pytest.mark.parametrize("fixture", [CAUSAL, REWARD, RUN, "reward-run/checkpoint-4", SHARDED, MODEL])
def test_good_fixture_is_silent(fixture: str) -> None:
    assert lines(judge(FIXTURES / fixture)) == []


@pytest.mark.parametrize(
    ("fixture", "base", "task"),
    [(CAUSAL, SHARDED, "causal-lm"), (REWARD, MODEL, "reward"), (RUN, MODEL, "reward"), (REWARD, MODEL, "seq-cls")],
)
def test_good_fixture_is_silent_with_its_base(fixture: str, base: str, task: str) -> None:
    report = judge(FIXTURES / fixture, base=FIXTURES / base, task=task)
    assert lines(report) == []
    assert report.skipped == ()


@pytest.mark.parametrize("fixture", ["reward-qwen2/merged", "causal-llama/merged"])
def test_good_merge_is_silent(fixture: str, tmp_path: Path) -> None:
    folder = copy_of(fixture, tmp_path)
    adapter = open_checkpoint(folder.parent / "adapter")
    assert lines(judge(folder)) == []
    assert lines(judge(folder, base=folder.parent / "base", adapters=[adapter]), Severity.INFO) == []
    assert lines(verify(folder).report, Severity.INFO) == []
    assert lines(judge(folder, base=folder.parent / "base", deep=True), Severity.INFO) == []


_NOT_HERE = {"CHECKPOINT", "QUANTISED", "some/model"}
"""What stands for a folder that no injury comes with."""
_UNLIKE = {
    "LT206 in a run": "its rank files have the rank of the config",
    "LT530": "its other adapter names another copy of the base",
    "LT217": "its tensors are LoRA's",
    "LT221": "its base has no experts",
    "LT601": "its adapter's alpha is nowhere: the next hint asks for it",
    "LT614 by its bytes": "no reward model was trained here",
    "LT803": "it has ranks of hundreds, which take long",
    "LT805": "its base has no biases, which nobody could know",
    "LT812": "its base is another model",
    "LT815": "its base is another model",
    "LT816 of a Mamba": "its base has no Mamba layers",
    "LT820": "its base is no mixture",
}
"""Injuries, or all of a rule, after which a file says what the others do not."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_injury_gives_its_code_alone_and_says_where_and_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation = MUTATIONS[name]
    folder = copy_of(mutation.of, tmp_path)
    break_(folder, name)
    report = _judged(folder, mutation)
    if mutation.quiet:
        assert mutation.code in codes(report, Severity.INFO)
        assert lines(report) == []
    else:
        assert codes(report) == {mutation.code}, lines(report)
    for finding in report.findings:
        if finding.code == mutation.code:
            assert finding.message
            assert finding.hint
            assert Path(finding.path).is_relative_to(tmp_path)
    if not _UNLIKE.keys() & {name, mutation.code} and " for " not in name:  # the same for another server
        monkeypatch.chdir(tmp_path)
        hints = dict.fromkeys(finding.hint or "" for finding in report.findings if finding.code == mutation.code)
        _require_that_each_works(hints, folder)


def _require_that_each_works(hints: Iterable[str], folder: Path) -> None:
    """Type each command: it is no usage error, what it asks for can be done, and a check that is repeated may fail again."""
    base, adapter, out = (folder.parent / name for name in ("base", "adapter", "out"))
    if not base.exists() and folder == adapter:
        shutil.copytree(FIXTURES / folder.parent.name / "base", base)
    stands_for = {"MODEL": base, "BASE": base, "ADAPTER": adapter, "A": adapter, "EXPERTS": out}
    written = {"OUT": out, "MERGED": out, "PLAIN": out, "RM-BASE": folder.parent / "rm-base"}
    for words in dict.fromkeys(tuple(words) for hint in hints for words in commands_in(hint)):
        if _NOT_HERE & {*words}:
            continue
        for each in (*written.values(), *folder.parent.glob("adapter-*")):
            shutil.rmtree(each, ignore_errors=True)
        code, printed = type_it(words, {name: str(path) for name, path in {**stands_for, **written}.items()})
        assert code == 0 or (words[0] in ("validate", "verify") and code in (1, 5)), f"{words}: {printed}"

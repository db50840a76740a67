"""Each rule sees the injury that it is for, and nothing else sees it; the good folders are silent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_tool import verify
from lora_tool.checkpoints import open_checkpoint
from lora_tool.core.report import Report, Severity
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, MODEL, MUTATIONS, REWARD, RUN, SHARDED, Mutation, break_, copy_of


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


@pytest.mark.parametrize("name", MUTATIONS)
def test_injury_gives_its_code_alone_and_says_where_and_what_to_do(name: str, tmp_path: Path) -> None:
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

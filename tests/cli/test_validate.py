from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from lora_tool.verification.validating import validate
from tests.cli.calling import FIXTURES, Caller, assert_golden

REWARD = "fixtures/reward-qwen2/adapter"


def edit_config(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return a copy of the reward adapter, with its base where its config says."""
    shutil.copytree(FIXTURES / "reward-qwen2", tmp_path / "reward")
    return tmp_path / "reward" / "adapter"


@pytest.fixture
def truncated(adapter: Path) -> Path:
    os.truncate(adapter / "adapter_model.safetensors", 9000)
    return adapter


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("validate-reward-qwen2.txt", [REWARD, "--rm"]),
        ("validate-causal-llama.txt", ["fixtures/causal-llama/adapter"]),
        ("validate-reward-run.txt", ["fixtures/reward-run", "--rm"]),
        ("validate-bases.txt", ["fixtures/causal-llama/base", "fixtures/reward-qwen2/base"]),
    ],
)
def test_good_fixtures_have_no_findings(call: Caller, name: str, args: list[str]) -> None:
    called = call("validate", *args)
    assert called.code == 0, called.out
    assert_golden(name, called.out)


def test_findings_are_on_stdout_and_the_exit_code_is_1(call: Caller, truncated: Path) -> None:
    called = call("validate", truncated)
    assert called.code == 1
    assert "LT101" in called.out
    assert called.err == ""
    assert "\x1b" not in called.out


def test_the_working_directory_is_the_default(call: Caller, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapter)
    assert call("validate").out.startswith("checked 1 adapter")


def test_json_has_the_fields_of_the_design(call: Caller, truncated: Path) -> None:
    called = call("validate", truncated, "--json")
    assert called.code == 1
    design = {"schema_version", "tool_version", "subjects", "findings", "skipped", "summary"}
    assert set(called.json) == design | {"ignored", "unread", "runs"}
    finding = called.json["findings"][0]
    assert set(finding) == {"code", "severity", "path", "subject", "message", "hint"}
    assert called.json == call("validate", truncated, "--format", "json").json


def test_select_and_ignore_take_lists_and_repeat(call: Caller, truncated: Path) -> None:
    assert call("validate", truncated, "--select", "LT2,LT3", "--select", "lt102").code == 0
    assert call("validate", truncated, "--ignore", "LT1").code == 0
    assert call("validate", truncated, "--select", "LT101").code == 1


def test_rm_contradicts_other_numbers_of_labels(call: Caller) -> None:
    assert call("validate", REWARD, "--rm", "--num-labels", "2").code == 2


def test_a_base_that_is_not_here_is_told_and_does_not_fail(call: Caller, adapter: Path) -> None:
    edit_config(adapter, base_model_name_or_path="somebody/some-model")
    called = call("validate", adapter)
    assert called.code == 0
    assert "skipped 19 rules on" in called.out
    assert "next:" not in called.out  # the line asks for a base
    assert re.search(r"decided: skipped .*LT520 on", call("validate", adapter, "--verbose").err)
    assert "somebody/some-model is neither a folder nor in the Hub cache" in called.out
    assert call("validate", adapter, "--strict").code == 1


@pytest.mark.parametrize("base", ["beside", "nowhere"])
def test_the_library_looks_for_the_base_as_the_command_does(call: Caller, adapter: Path, base: str) -> None:
    if base == "nowhere":
        shutil.rmtree(adapter.parent / "base")
    found = validate(adapter).to_json()
    assert found == call("validate", adapter, "--json").json
    assert bool(found["skipped"]) is (base == "nowhere")


def test_all_paths_are_judged_though_one_cannot_be_read(call: Caller, truncated: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    called = call("validate", tmp_path / "empty", REWARD, truncated, "--json")
    assert called.code == 3
    assert len(called.json["subjects"]) == 2
    assert called.json["summary"]["errors"] >= 1
    assert f"error: {tmp_path / 'empty'} is an empty folder" in called.err


def test_quiet_says_nothing_where_nothing_is_wrong(call: Caller, truncated: Path) -> None:
    assert call("validate", "-q", REWARD).out == ""
    assert call("validate", "-q", REWARD, "--json").json["summary"]["errors"] == 0
    assert "LT101" in call("validate", "-q", truncated).out


# reports


def test_reports_are_written_while_text_is_printed(call: Caller, truncated: Path, tmp_path: Path) -> None:
    files = {form: tmp_path / "out" / f"report.{form}" for form in ("json", "github", "markdown", "junit", "sarif")}
    called = call("validate", truncated, *(f"--report={form}={path}" for form, path in files.items()))
    assert called.code == 1
    assert called.out.startswith(str(truncated))
    for form, path in files.items():
        assert path.read_text() == call("validate", truncated, "--format", form).out, form
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in files.values())


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("junit", "is not FORMAT=FILE"),
        ("junit=", "is not FORMAT=FILE"),
        ("junitt=x", "Did you mean 'junit'?"),
        ("json=.", "is a folder"),
    ],
)
def test_a_report_that_cannot_be_written_is_told_before_the_work(call: Caller, value: str, told: str) -> None:
    called = call("validate", REWARD, "--report", value)
    assert (called.code, called.out) == (2, "")
    assert told in called.err


def test_a_report_that_cannot_be_written_after_all_is_one_error(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    called = call("validate", REWARD, "--report", f"json={tmp_path / 'file' / 'report.json'}")
    assert called.code == 3
    assert called.out.startswith("checked 1 adapter")
    assert "report.json: the report cannot be written" in called.err


def test_a_job_summary_is_added_to(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    for _ in range(2):
        call("validate", REWARD, "--report", f"markdown={path}")
    assert path.read_text().startswith("before\n###")
    assert path.read_text().count("### ") == 2


def test_what_a_server_refuses_is_asked_for_by_name(call: Caller) -> None:
    assert call("validate", REWARD).code == 0
    called = call("validate", REWARD, "--for", "sglang", "--for", "vllm")
    assert called.code == 1
    assert "lora-tool merge --rm fixtures/reward-qwen2/adapter" in called.out
    assert call("validate", REWARD, "--for", "tgi").code == 2


@pytest.mark.parametrize("args", [[], ["--deep"]])
def test_strict_reads_a_model_and_is_content_with_a_good_one(call: Caller, args: list[str]) -> None:
    called = call("validate", "fixtures/causal-llama/base", "--strict", *args)
    assert (called.code, "skipped" in called.out) == (0, False)
    assert "LT209" in call("validate", "fixtures/causal-llama/base").out


# configuration


@pytest.fixture
def project(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project's folder, which is the working directory, with an adapter in `reward/adapter`."""
    root = adapter.parents[1]
    monkeypatch.chdir(root)
    os.truncate(adapter / "adapter_model.safetensors", 9000)
    return root


FORMS = ["lora-tool.toml", "pyproject.toml"]


def configure(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text if name == "lora-tool.toml" else f"[tool.lora-tool]\n{text}")


@pytest.mark.parametrize("name", FORMS)
def test_configuration_ignores_with_a_reason(call: Caller, project: Path, name: str) -> None:
    configure(project, name, 'ignore = {LT101 = "cut on purpose"}\nselect = ["LT1"]\n')
    called = call("validate", "reward/adapter")
    assert called.code == 0
    assert "ignored LT101: cut on purpose" in called.out
    shown = call("validate", "reward/adapter", "--json").json
    assert shown["ignored"] == [{"code": "LT101", "reason": "cut on purpose"}]
    assert shown["findings"] == []


@pytest.mark.parametrize("name", FORMS)
def test_the_command_line_wins_over_the_configuration(call: Caller, project: Path, name: str) -> None:
    configure(project, name, 'select = ["LT2"]\nformat = "json"\nreport = "junit=out/report.xml"\nfor = "vllm@0.32"\n')
    assert call("validate", "reward/adapter").json["findings"] == []
    assert (project / "out" / "report.xml").is_file()
    called = call("validate", "reward/adapter", "--select", "LT101", "--format", "text", "--report=json=mine.json")
    assert (called.code, "LT101" in called.out) == (1, True)
    assert (project / "mine.json").is_file()


def test_configuration_is_found_above_and_reports_lie_beside_it(
    call: Caller, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(project, "lora-tool.toml", 'report = ["json=report.json"]\nstrict = true\n')
    (project / "deeper").mkdir()
    monkeypatch.chdir(project / "deeper")
    call("validate", "../reward/adapter")
    assert (project / "report.json").is_file()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fail_on = 'error'", "Did you mean 'fail-on'?"),
        ("ignroe = []", "Did you mean 'ignore'?"),
        ("x = 1", "Known: select"),
        ("fail-on = 'info'", "none of error, warning"),
        ("fail-on = 3", "`fail-on`: expected string, found 3"),
        ("for = ['vlm']", "Did you mean 'vllm'?"),
        ("for = 'vllm@0.1'", "expected one of 0.32.0"),
        ("ignore = {LT101 = ''}", "expected reason"),
        ("ignore = {LT1011 = 'x'}", "Did you mean LT1"),
        ("select = ['LT9']", "There is no rule"),
        ("select = 3", "expected list of strings"),
        ("strict = 'yes'", "expected true or false"),
        ("report = ['pdf=x']", "unknown format 'pdf'"),
        ("select = [", "is not valid TOML"),
        ("# lora-tool " + "x" * 2_000_000, "more than the 1,048,576 that lora-tool reads"),
    ],
)
def test_a_configuration_that_is_wrong_is_a_usage_error(call: Caller, project: Path, text: str, told: str) -> None:
    configure(project, FORMS[len(told) % 2], text)
    called = call("validate", "reward/adapter")
    assert (called.code, called.out) == (2, "")
    assert told in called.err


def test_other_tools_pyproject_is_nothing_to_us(call: Caller, project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.other]\nlora-tool = 1\n")
    assert call("validate", "reward/adapter").code == 1


def test_a_checkpoint_does_not_say_which_of_its_faults_count(
    call: Caller, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(project / "reward" / "adapter", "lora-tool.toml", "ignore = ['LT1']\nreport = 'json=gone.json'\n")
    monkeypatch.chdir(project / "reward" / "adapter")
    called = call("validate")
    assert called.code == 1
    assert "is ignored because it lies in a folder that is being checked (--config uses it anyway)" in called.err
    assert not Path("gone.json").exists()
    assert call("validate", "--config", "lora-tool.toml").code == 0


def test_a_configuration_that_is_given_must_be_there(call: Caller, project: Path) -> None:
    assert call("validate", "reward/adapter", "--config", "nowhere.toml").code == 2
    (project / "pyproject.toml").write_text("[project]\n")
    assert call("validate", "reward/adapter", "--config", "pyproject.toml").code == 2


def test_several_end_with_a_table_and_the_worst_exit_code(call: Caller, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    good = "fixtures/reward-qwen2/adapter"
    done = call("validate", tmp_path / "nowhere", broken, good)
    assert done.code == 3
    assert "no such folder" in done.err
    folder, *rows = [line.split() for line in done.out.splitlines()[-4:]]
    assert folder[:3] == ["folder", "kind", "verdict"]
    assert rows[0][:3] == [str(tmp_path / "nowhere"), "not", "read"]
    assert rows[1][:4] == [str(broken), "adapter", "failed", "1"]
    assert rows[2] == [good, "adapter", "passed"]
    assert call("validate", broken, good).code == 1
    assert call("validate", good, good, "--quiet").out == ""
    assert len(call("validate", broken, good, "--json").json["subjects"]) == 2


@pytest.mark.parametrize("named", ["meta-llama/Llama-3.1-8B-Instruct", "/workspace/llama-base"])
def test_a_base_that_is_not_here_to_compare_with_is_skipped_and_strict_fails(
    named: str, call: Caller, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURES / "causal-llama", tmp_path / "llama")
    adapter, base = tmp_path / "llama" / "adapter", tmp_path / "llama" / "base"
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": named}))
    plain = call("validate", adapter, "--base", base)
    assert plain.code == 0
    assert f"skipped LT520 on {adapter}: whether {base} is the base that the adapter names was not checked" in plain.out
    assert named in plain.out
    assert "--ignore LT520" in plain.out
    for command in (("validate", adapter), ("ci", adapter, "-o", tmp_path / "out", "--dry-run")):
        strict = call(*command, "--base", base, "--strict")
        assert (strict.code, "skipped LT520" in strict.out) == (1, True)
        assert call(*command, "--base", base, "--strict", "--ignore", "LT520").code == 0


def test_a_good_adapter_with_its_base_has_nothing_skipped(call: Caller) -> None:
    called = call("validate", "fixtures/causal-llama/adapter", "fixtures/reward-qwen2/adapter", "--strict", "--json")
    assert (called.code, called.json["skipped"]) == (0, [])


@pytest.mark.parametrize("name", ["adapter_model (1).safetensors", "adapter_config copy.json"])
def test_a_file_that_a_browser_renamed_is_named_with_its_right_name(name: str, call: Caller, adapter: Path) -> None:
    right = re.sub(r" [(\w)]+(?=\.)", "", name)
    (adapter / right).rename(adapter / name)
    printed = call("validate", adapter).out
    assert f"is missing, but {name} is there" in printed
    assert f"hint: mv '{adapter / name}' {adapter / right}" in printed
    (adapter / name).rename(adapter / f"mine{Path(name).suffix}")
    assert f"hf download OWNER/NAME {right} --local-dir {adapter}" in call("validate", adapter).out or "json" in name

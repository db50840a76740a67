"""What `after:` runs when training has ended, against a Hub on the loopback: what is said and left when a step fails."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_tool.cli.after_training import carry_on, foreseen
from lora_tool.errors import BadRunConfig
from lora_tool.train.config import RunConfig, read_run_config
from lora_tool.train.methods import METHODS
from tests.hub.conftest import environment
from tests.hub.server import Hub
from tests.train.running import FIXTURES


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that the commands, processes of their own, are led to by the environment."""
    with Hub() as opened:
        for name, value in environment(opened, tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield opened


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A reward adapter as training leaves it, beside its base."""
    shutil.copytree(FIXTURES / "reward-qwen2" / "base", tmp_path / "base")
    return Path(shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "adapter"))


def run(folder: Path, after: Mapping[str, Any], **options: Any) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"lora_tool": {"after": dict(after)}, **options}))
    return read_run_config(METHODS["reward"], path, ())


def test_a_push_that_is_refused_says_how_to_go_on(
    hub: Hub, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    merged = tmp_path / "merged"
    asked = run(tmp_path, {"validate": True, "merge": {"output": str(merged)}, "push": "me/reward"})
    reading = next(token for token, role in hub.tokens.items() if role == "read")
    monkeypatch.setenv("HF_TOKEN", reading)
    assert carry_on(asked, trained) == 4
    assert (merged / "lora_tool.json").is_file()
    assert not hub.repos
    (hint,) = [line for line in capfd.readouterr().err.splitlines() if "continue with: " in line]
    assert "the trained output is saved" in hint
    line = hint.partition("continue with: ")[2]
    assert shlex.split(line) == ["lora-tool", "ci", str(trained), "-o", str(merged), "--rm", "--push=me/reward"]

    # the line is what goes on, and what is proven is not done again
    written = {path.name: path.stat().st_mtime_ns for path in merged.glob("*.safetensors")}
    monkeypatch.setenv("HF_TOKEN", hub.token)
    subprocess.run([sys.executable, "-m", "lora_tool", *shlex.split(line)[1:]], check=True, stdout=subprocess.DEVNULL)
    files = hub.repos["me/reward"].files("main")
    for path in merged.glob("*.safetensors"):
        assert files[path.name] == path.read_bytes()
        assert written[path.name] == path.stat().st_mtime_ns


def test_a_merge_that_fails_says_how_to_go_on(
    hub: Hub, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "base")
    asked = run(tmp_path, {"merge": {"base": str(tmp_path / "base")}, "push": {"repo": "me/reward"}})
    assert carry_on(asked, trained) == 3
    assert not hub.repos
    assert not (tmp_path / "adapter-merged").exists()
    again = f"ci {trained} -o {trained}-merged --rm --base={tmp_path / 'base'} --push=me/reward"
    assert f"continue with: lora-tool {again}\n" in capfd.readouterr().err


def test_what_would_fail_at_the_end_is_told_at_the_beginning(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name in ("HF_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    asked = run(tmp_path, {"merge": {"output": str(tmp_path / "base")}, "push": "me/reward"})
    found = {item.code: item.severity.value for item in foreseen(asked, trained)}
    assert found == {"merge-output": "error", "no-token": "warning"}
    asked = run(tmp_path, {"merge": {"output": str(tmp_path / "base"), "overwrite": True}, "push": "me/reward"})
    assert [item.code for item in foreseen(asked, trained)] == ["no-token"]
    asked = run(tmp_path, {"push": "me/reward"}, env={"HF_TOKEN": "hf_x"})
    assert not list(foreseen(asked, trained))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"merge": {"precision": "flaot32"}}, "after: .*flaot32"),
        ({"merge": {"dtype": "bf17"}}, "after: .*bf17"),
        ({"merge": {"jobs": "lots"}}, "after: .*lots"),
        ({"merge": {"ouput": "x"}}, "after.merge.ouput`: unknown key. Did you mean 'output'"),
        ({"push": "me/my/model"}, "after: .*me/my/model"),
        ({"push": {"repo": "me/x", "privat": True}}, "after.push.privat`: unknown key. Did you mean 'private'"),
    ],
)
def test_a_value_that_a_command_would_refuse_is_a_usage_error(tmp_path: Path, after: Any, said: str) -> None:
    with pytest.raises(BadRunConfig, match=said):
        list(foreseen(run(tmp_path, after), tmp_path / "out"))

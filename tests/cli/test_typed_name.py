"""`hf lora`: what huggingface_hub's own code installs and starts is named as it was typed, and ends as `lora-tool` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_lora
import pytest
from msgspec import toml

from lora_tool.cli.main import COMMANDS
from lora_tool.cli.typed_name import spoken
from tests.cli.calling import REPOSITORY

extensions = pytest.importorskip("huggingface_hub.cli.extensions", reason="huggingface_hub 2.4 has extensions")
PIP = f"{sys.executable} -m pip install"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hint: lora-tool merge 'my adapter' -o OUT", "hint: hf lora merge 'my adapter' -o OUT"),
        ("`lora-tool COMMAND --help`, `lora-tool\n  ls`", "`hf lora COMMAND --help`, `hf lora\n  ls`"),
        ("pip install 'lora-tool[merge]'", f"{PIP} 'lora-tool[merge]'"),
        ("pip install -e '/a/lora-tool[merge]'", None),
        ("lora-tool does not read it; lora-tool 0.1.0; lora-tool merged", None),
        ("/home/me/lora-tool merge", None),
        ("lora-tool merge/adapter: no such folder; 'lora-tool merge'", None),
    ],
)
def test_commands_are_called_as_they_were_typed_and_nothing_else_is(text: str, expected: str | None) -> None:
    assert spoken("hf lora", COMMANDS)(text) == (expected or text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return huggingface_hub's module of extensions, with ours installed by it from the files of our script.

    What stands for uv writes the scripts of a project with the dependencies of that one, as uv would.
    """
    hf_lora.write(tmp_path / "source")
    [needed] = toml.decode((tmp_path / "source" / "pyproject.toml").read_text())["project"]["dependencies"]
    ours = toml.decode((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert needed.partition("==")[0] == ours["name"]
    [module, function] = ours["scripts"]["hf-lora"].split(":")

    def uv(command: list[str], **_: Any) -> None:
        assert command[1] == "venv" or command[-1] == "https://github.com/me/hf-lora/archive/HEAD.zip"
        script = extensions.EXTENSIONS_ROOT / "hf-lora" / "venv" / "bin" / "hf-lora"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        script.chmod(0o755)

    def requested(_: str, url: str, **__: Any) -> Any:
        raise OSError(url)

    monkeypatch.setattr(extensions, "EXTENSIONS_ROOT", tmp_path / "extensions")
    with monkeypatch.context() as patch:
        patch.setattr(extensions, "_github_request", requested)
        patch.setattr(extensions, "_can_run", lambda _: False)
        patch.setattr(extensions.subprocess, "run", uv)
        patch.setattr(extensions.shutil, "which", lambda name: name)
        extensions._install_extension(owner="me", repo_name="hf-lora", short_name="lora")
    monkeypatch.setattr(extensions.constants, "HF_HUB_DISABLE_UPDATE_CHECK", True)
    monkeypatch.chdir(REPOSITORY)
    return extensions


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["fixtures/reward-qwen2/adapter", "--rm"], 0, "next: hf lora merge --rm fixtures/reward-qwen2/adapter\n"),
        (["fixtures/zero/stage3-frozen-head"], 1, "checkpoint: hf lora consolidate fixtures/zero/stage3-frozen-head\n"),
        (["--help"], 0, "Usage: hf lora validate [OPTIONS]"),
        (["--no-such-option"], 2, "hint: hf lora validate --help\n"),
    ],
    ids=["sound", "findings", "help", "usage"],
)
def test_hf_lora(installed: Any, capfd: pytest.CaptureFixture[str], words: list[str], code: int, said: str) -> None:
    assert installed.dispatch_unknown_top_level_extension(["lora", "validate", *words], {"auth"}) == code
    out, err = capfd.readouterr()
    assert said in out + err
    assert "lora-tool validate" not in out + err


def test_typed_itself_it_has_its_own_name_and_completion(tmp_path: Path) -> None:
    script = tmp_path / "hf-lora"
    script.write_text("from lora_tool.__main__ import main\nmain()\n")
    words = [sys.executable, str(script), "completion", "bash"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "_hf_lora_completion hf-lora" in done.stdout
    assert 'eval "$(hf-lora completion bash)"' in done.stderr
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *words[:2], "validate", "nowhere"]
    assert subprocess.run(closed, capture_output=True, check=False).returncode == 3

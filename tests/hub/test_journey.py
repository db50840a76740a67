"""The whole way, as the tutorial shows it: from training under ZeRO-3, saved wrongly, to a model loaded from the Hub."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from tests.cli.calling import REPOSITORY, Caller
from tests.hub.server import Hub
from tests.oracle.test_deepspeed_itself import require_truth
from tests.readme import TUTORIAL, as_shown, transcripts

TRAINED = Path("runs/stage3-reward")


def rough(text: str) -> str:
    """Return the text without what another machine's training changes: digits after the point, hashes, the least."""
    text = re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", text)
    text = re.sub(r"the least in \S+,", "the least,", text)
    return re.sub(r" *-?\d+\.\d+(?:e[-+]\d+)?", " #", text)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_tutorials_journey(
    call: Caller, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(REPOSITORY / "fixtures", tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    (commands,) = transcripts(TUTORIAL.read_text())
    assert [shlex.split(line)[1] for line, _ in commands] == [
        "fixtures/make_zero.py", "validate", "consolidate", "merge", "verify", "push", "fixtures/rewards.py",
    ]  # fmt: skip
    for line, shown in commands:
        program, *arguments = shlex.split(line)
        if program == "lora-tool":
            done = call(*arguments)
            assert done.code == (1 if arguments[0] == "validate" else 0), done.err
            printed = done.out
        elif arguments[0].endswith("rewards.py"):  # in this process, where torch is loaded, and the Hub is known
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(arguments[0])["main"](snapshot_download(arguments[1]), arguments[2])
            printed = capsys.readouterr().out
            assert ended.value.code == 0, printed
        else:
            trained = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
            assert trained.returncode == 0, trained.stderr[-2000:]
            printed = trained.stdout
        assert rough(as_shown(printed, tmp_path, hub.url)) == rough(shown), "python -m tests.readme"
    assert len(hub.repos["me/reward-model"].commits) == 2  # the one that creates the repository, and one
    assert json.loads((TRAINED / "adapter_config.json").read_text())["target_modules"][-2:] == ["up_proj", "v_proj"]
    require_truth(TRAINED, tmp_path)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calling import FIXTURES, on_a_terminal


def test_a_terminal_gets_colours_unless_its_user_says_no(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text((FIXTURES / "causal-llama/adapter/adapter_config.json").read_text())
    args = ["validate", str(tmp_path)]
    assert "\x1b[" in on_a_terminal(*args)
    plain = on_a_terminal(*args, NO_COLOR="1")
    assert plain
    assert "\x1b" not in plain


def test_the_verdict_of_a_merge_stands_out(tmp_path: Path) -> None:
    written = on_a_terminal("merge", str(FIXTURES / "reward-qwen2" / "adapter"), "-o", str(tmp_path / "out"))
    loud = [line for line in written.splitlines() if line.startswith("\x1b[32m\x1b[1m")]
    assert [line.split()[0].rpartition("m")[2] for line in loud] == ["verified"]
    quiet = [line for line in written.splitlines() if "\x1b[2m" in line]
    assert quiet
    assert all("copied" in line or "written" in line or "the base's" in line for line in quiet)


@pytest.mark.parametrize(
    ("command", "columns", "names"),
    [
        (["ls"], 60, ["checkpoint-2", "checkpoint-4 *", "0.617", "good"]),
        (["diff", "checkpoint-2", "checkpoint-4"], 80, ["down_proj", "score.weight", "0.182", "cosine"]),
        (["inspect", "checkpoint-2"], 60, ["gate_proj", "scaling", "0.193"]),
        (["prune"], 60, ["checkpoint-2", "88 KiB", "goes"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_no_name_or_number_is_broken_where_the_terminal_is_narrow(
    command: list[str], columns: int, names: list[str]
) -> None:
    name, *paths = command
    run = FIXTURES / "reward-run"
    written = on_a_terminal(name, *(str(run / path) for path in paths or ["."]), columns=columns, NO_COLOR="1")
    rows = written.splitlines()
    for shown in names:
        assert any(f"  {shown}  " in f"  {row}  " or row.endswith(f"  {shown}") for row in rows), (shown, written)

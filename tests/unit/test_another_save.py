"""What a finding about a broken save names instead: the save of the same run that lies nearest before it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_tool.checkpoints import open_sharded
from lora_tool.rules.training.sharded_subject import another_save
from lora_tool.verification.validating import validate

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.mark.parametrize(
    ("saves", "broken", "command"),
    [
        (("checkpoint-2/global_step2", "checkpoint-10/global_step10"), "checkpoint-10/global_step10", "checkpoint-2"),
        (("checkpoint-2/global_step2", "checkpoint-10/global_step10"), "checkpoint-2/global_step2", "checkpoint-10"),
        (("global_step2", "global_step9", "global_step10"), "global_step10", ". --tag global_step9"),
        (("_actor/global_step2", "_actor/global_step4"), "_actor/global_step4", "_actor --tag global_step2"),
        (("global_step_2/actor", "global_step_4/actor"), "global_step_4/actor", ". --tag global_step_2"),
        (("iter_0000002/dist_ckpt", "iter_0000004/dist_ckpt"), "iter_0000004/dist_ckpt", ". --tag iter_0000002"),
        (("checkpoint-2/pytorch_model_fsdp_0", "checkpoint-4/pytorch_model_fsdp_0"), "checkpoint-4", "checkpoint-2"),
    ],
)
def test_the_save_before_it_is_named_or_else_the_next(
    saves: tuple[str, ...], broken: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for save in saves:
        (tmp_path / save).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert another_save(tmp_path / broken / "file.pt").endswith(f": lora-tool consolidate {command}")


@pytest.mark.parametrize("saves", [("lr1/global_step2", "lr2/global_step4"), ("lr1/global_step2", "lr1/global_step4")])
def test_neither_another_run_nor_a_later_save_is_named_where_the_run_diverged(
    saves: tuple[str, ...], tmp_path: Path
) -> None:
    for save in saves:
        (tmp_path / save).mkdir(parents=True)
    assert another_save(tmp_path / saves[0] / "file.pt", earlier=True) == "use an earlier save of the run"


def test_the_hint_of_a_broken_rank_file_can_be_pasted(tmp_path: Path) -> None:
    for step in (2, 4):
        shutil.copytree(FIXTURES / "zero" / "stage3-reward", tmp_path / "my run" / f"checkpoint-{step}")
    broken = tmp_path / "my run" / "checkpoint-4"
    next((broken / "global_step2").glob("*rank_1*optim*")).write_bytes(b"cut")
    (finding,) = validate(open_sharded(broken), select=["LT402"]).findings
    assert finding.hint == f"copy it again, or use checkpoint-2: lora-tool consolidate '{tmp_path}/my run/checkpoint-2'"

"""What servers refuse: what is said beyond the code, and adapters that they take."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from lora_tool import validate
from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.core.report import Severity
from lora_tool.plans.algebra.plan_prepare import plan_prepare
from lora_tool.rules.engine.subjects import Server
from lora_tool.workflows.written import Written
from tests import checkpoint_edits as edit
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, REWARD, copy_of
from tests.mutations.served import plain

SERVERS = ["peft", "vllm", "sglang", "llama.cpp"]


@pytest.mark.parametrize("server", SERVERS)
def test_a_plain_adapter_is_taken_by_all(server: str, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    assert lines(judge(folder, servers=[server])) == []


def test_nothing_is_said_about_serving_unless_asked() -> None:
    report = judge(FIXTURES / REWARD)
    assert not any(code.startswith("LT8") for code in codes(report, Severity.INFO))
    assert not any(skipped.code.startswith("LT8") for skipped in report.skipped)
    assert not any(code.startswith("LT8") for code in report.subjects[0].rules)


def test_a_reward_adapter_must_be_merged_and_the_command_is_right(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "my adapter"))
    (finding,) = judge(folder, servers=["sglang"]).findings
    assert finding.code == "LT801"
    command = shlex.split(str(finding.hint).partition(": ")[2])
    assert command == ["lora-tool", "merge", "--rm", str(folder)]


def test_two_servers_are_judged_at_once() -> None:
    messages = [finding.message for finding in judge(FIXTURES / REWARD, servers=["vllm", "sglang"]).findings]
    assert [message.split()[0] for message in messages] == ["vLLM", "SGLang"]


@pytest.mark.parametrize(("rank", "flag"), [(8, None), (16, None), (17, "32"), (64, "64"), (300, "320"), (512, "512")])
def test_the_flag_for_the_rank_is_named(rank: int, flag: str | None, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    with edit.tensors(folder) as table:
        for name, tensor in table.items():
            at = 0 if ".lora_A." in name else 1
            table[name] = edit.raw(*(rank if index == at else side for index, side in enumerate(tensor.shape)))
    with edit.fields(folder) as config:
        config["r"] = rank
    found = [finding for finding in judge(folder, servers=["vllm"]).findings if finding.code == "LT803"]
    assert (f"--max-lora-rank {flag} " in str(found[0].hint)) if flag else found == []


def test_lora_outside_of_the_language_model_names_what_vllm_is_started_with(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    with edit.tensors(folder) as table:
        held = {name.replace(".layers.", ".vision_tower.layers."): tensor for name, tensor in table.items()}
        table.clear()
        table.update(held)
    with edit.fields(folder) as config:
        config["rank_pattern"] = {"q_proj": 64}
    (found,) = [finding for finding in judge(folder, servers=["vllm"]).findings if finding.code == "LT803"]
    assert "vllm serve BASE --enable-lora --enable-tower-connector-lora --max-lora-rank 64" in str(found.hint)
    with edit.fields(folder) as config:
        config |= {"rank_pattern": {}, "base_model_name_or_path": "acme/with-a-vision-tower"}
    adapter = open_checkpoint(folder)
    assert isinstance(adapter, AdapterDir)
    written = Written(path=tmp_path / "out", plan=plan_prepare(adapter, Server.VLLM, ignore=("LT8",)), fidelity=None)
    assert " --enable-lora --enable-tower-connector-lora --max-lora-rank " in str(written)


def test_other_modules_than_heads_are_refused_by_vllm(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    assert codes(judge(folder, servers=["vllm"]), Severity.ERROR) == set()
    with edit.fields(folder) as config:
        config["modules_to_save"].append("lm_head")
    assert codes(judge(folder, servers=["vllm"], select=["LT8"]), Severity.ERROR) == {"LT801"}


def test_a_pattern_of_ranks_alone_is_right_in_llama_cpp(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with edit.fields(folder) as config:
        config |= {"use_rslora": False, "alpha_pattern": {}}
    assert codes(judge(folder, servers=["llama.cpp"])) == set()


@pytest.mark.parametrize("config", [None, '{"model_type": "llama", "text_config": {"model_type": []}}', "{}", "[]"])
def test_a_base_without_a_usable_config_is_no_crash(config: str | None, tmp_path: Path) -> None:
    base = Path(shutil.copytree(FIXTURES / "causal-llama" / "base", tmp_path / "base"))
    (base / "config.json").unlink()
    if config is not None:
        (base / "config.json").write_text(config)
    adapter = FIXTURES / "causal-llama" / "adapter"
    assert validate(adapter, base=base, servers=list(Server)).subjects

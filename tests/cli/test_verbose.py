"""`-v` says what was decided and why; a long command says how long it took."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_tool.core.display import duration
from tests.checkpoint_edits import fields, raw, tensors
from tests.cli.calling import FIXTURES, Called, Caller
from tests.mutations import CAUSAL, MODEL, REWARD, copy_of


def decisions(done: Called) -> list[str]:
    """What was decided, and nothing twice."""
    assert done.code == 0, done.err
    found = [line.removeprefix("decided: ") for line in done.err.splitlines() if line.startswith("decided: ")]
    assert len(found) == len(set(found))
    return found


def test_a_merge_says_why(call: Caller, tmp_path: Path) -> None:
    adapter = copy_of(REWARD, tmp_path)
    base = adapter.parent / "base"
    done = call("merge", adapter, "-o", tmp_path / "out", "-v")
    assert decisions(done) == [
        f"../base is the folder {base}, seen from {adapter}",
        f"base: {base}, named in {adapter / 'adapter_config.json'}",
        "task: seq-cls, as the adapter's config says",
        "names: those of qwen2 are the same on disk and in memory, so transformers is not needed",
        "head: `score.weight` of the adapter, which saved it whole, 1 row",
        next(line for line in done.err.splitlines() if "arithmetic" in line).removeprefix("decided: "),
    ]
    assert "arithmetic: float32 precision by " in done.err
    assert decisions(call("merge", adapter, "-o", tmp_path / "out", "--overwrite")) == []
    given = decisions(call("merge", adapter, "--base", base, "--rm", "--dry-run", "--verbose"))
    assert f"base: {base}, as given" in given
    assert "task: reward, as requested" in given


def test_a_task_that_nobody_names_is_the_heads_or_the_bases(call: Caller, tmp_path: Path) -> None:
    for fixture, why in ((REWARD, "because the adapter holds a head, `score`"), (CAUSAL, "is LlamaForCausalLM")):
        adapter = copy_of(fixture, tmp_path)
        with fields(adapter) as config:
            config["task_type"] = None
        said = decisions(call("merge", adapter, "--dry-run", "-v", "--ignore", "LT304"))
        assert any(line.startswith("task: ") and line.endswith(why) for line in said), said


def test_that_transformers_is_asked_is_said(call: Caller, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install lora-tool[merge]")
    adapter, shard, name = copy_of(CAUSAL, tmp_path), "model-00001-of-00002.safetensors", "model.layers.0.extra.weight"
    base = adapter.parent / "base"
    with tensors(base, shard) as table, fields(base, "model.safetensors.index.json") as index:
        table[name] = raw(4)
        index["weight_map"][name] = shard
        index["metadata"]["total_size"] += len(table[name].data)
    said = decisions(call("merge", adapter, "--dry-run", "-v"))
    assert "names: transformers says where the parameters of LlamaForCausalLM are on disk" in said


def test_validate_says_which_base_and_what_is_read(call: Caller, tmp_path: Path) -> None:
    adapter = copy_of(CAUSAL, tmp_path)
    said = decisions(call("validate", adapter, "-v"))
    assert f"{adapter} is an adapter" in said
    assert any(line.startswith("weights: those of adapters") for line in said)
    assert f"base: {adapter.parent / 'base'}, as given" in decisions(
        call("validate", adapter, "--base", adapter.parent / "base", "-v", "--headers-only")
    )
    (tmp_path / "lora-tool.toml").write_text('ignore = ["LT208"]\n')
    shutil.rmtree(adapter.parent / "base")
    assert any("no base model" in line for line in decisions(call("validate", adapter, "-v")))
    model = copy_of(MODEL, tmp_path / "model")
    assert f"{model} is a base model" in " ".join(decisions(call("validate", model, "-v", "--deep")))


def test_consolidate_says_which_tag_and_config(call: Caller, tmp_path: Path) -> None:
    ranks = FIXTURES / "zero" / "stage3-saved"
    said = decisions(call("consolidate", ranks, "-o", tmp_path / "out", "-v"))
    assert "tag: global_step2, as `latest` says" in said
    assert "what: adapter, because there are LoRA tensors" in said
    assert f"adapter config: {ranks / 'adapter_config.json'}, the nearest" in said
    asked = decisions(call("consolidate", ranks, "--tag", "global_step2", "--what", "state", "--dry-run", "-v"))
    assert asked[0] == "tag: global_step2, as requested"


@pytest.mark.parametrize(
    "words",
    [
        "merge ADAPTER -o OUT",
        "consolidate RANKS -o OUT",
        "verify MODEL",
        "ci ADAPTER -o OUT",
        "resize ADAPTER --rank 1 -o OUT",
    ],
)
def test_a_long_command_says_how_long_it_took(words: str, call: Caller, tmp_path: Path) -> None:
    adapter = copy_of("reward-qwen2/merged", tmp_path).parent / "adapter"
    places = {"ADAPTER": adapter, "MODEL": adapter.parent / "merged", "OUT": tmp_path / "out"}
    typed = [places.get(word, word) for word in words.split()]
    typed = [FIXTURES / "zero" / "stage3-saved" if word == "RANKS" else word for word in typed]
    assert "took " not in call(*typed).err
    call.long = 0.0
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert call(*typed).err.splitlines()[-1].startswith("took 0.")
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert "took" not in call(*typed, "-q").err


def test_a_time_is_said_as_people_say_it() -> None:
    assert [duration(seconds) for seconds in (0.04, 59.4, 59.6, 125, 3720)] == [
        "0.0 s",
        "59.4 s",
        "1 min 0 s",
        "2 min 5 s",
        "1 h 2 min",
    ]

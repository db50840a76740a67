"""Trap 5: CPO and its kin. The pad token, the columns, pairs without a preference, rows that are cut or dropped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lora_tool.train.config import GuardSettings
from lora_tool.train.job import TrainingJob
from lora_tool.train.worker import TrainingProcess
from tests.train.running import LLAMA, QWEN2, Trainings, codes, labelled, pairs, prompts, texts, write_rows

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def padless(tmp_path: Path) -> Path:
    """A Llama whose tokenizer has no pad token, as Llama's own has none."""
    base = tmp_path / "padless"
    shutil.copytree(LLAMA, base)
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    return base


@pytest.mark.parametrize("method", ["cpo", "orpo"])
def test_an_unset_pad_token_is_set_and_said(train: Trainings, padless: Path, method: str) -> None:
    outcome = train(method, model_name_or_path=str(padless), rows=pairs())
    assert (outcome.status.value, outcome.findings) == ("done", ())
    assert any(note.startswith("set pad_token: </s>") for note in outcome.notes)
    assert outcome.facts["moved"] > 0


@pytest.mark.parametrize(
    ("method", "rows"),
    [("cpo", pairs()), ("orpo", pairs()), ("dpo", pairs()), ("kto", labelled())],
    ids=["cpo", "orpo", "dpo", "kto"],
)
def test_healthy_runs_pass_without_a_word(train: Trainings, method: str, rows: list[dict[str, Any]]) -> None:
    outcome = train(method, model_name_or_path=str(QWEN2), rows=rows, gradient_accumulation_steps=2)
    assert (outcome.status.value, outcome.findings) == ("done", ())
    assert "effective batch size 8: 4 per device × 2 accumulation × 1 processes" in outcome.notes[0]
    assert not any(note.startswith("set pad_token") for note in outcome.notes)
    saved = load_file(train.output / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert json.loads((train.output / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("method", "rows", "expected"),
    [
        ("cpo", texts(4), "chosen + rejected"),
        ("reward", prompts(4), "chosen + rejected"),
        ("sft", pairs(4), "text"),
        ("kto", texts(4), "prompt + completion + label"),
        ("grpo", texts(4), "prompt"),
    ],
    ids=["cpo", "reward", "sft", "kto", "grpo"],
)
def test_wrong_columns_name_the_right_ones(train: Trainings, method: str, rows: Any, expected: str) -> None:
    extra = {"reward_funcs": ["tests.train.test_grpo.varied"], "num_generations": 4} if method == "grpo" else {}
    outcome = train(method, model_name_or_path=str(QWEN2), rows=rows, **extra)
    assert (outcome.status.value, codes(outcome)) == ("refused", {"columns"})
    assert expected in outcome.findings[0].message
    assert f"the data has {', '.join(rows[0])}" in outcome.findings[0].message


@pytest.mark.parametrize("method", ["cpo", "dpo", "reward", "orpo"])
def test_pairs_without_a_preference_are_refused(train: Trainings, method: str) -> None:
    rows = [{**row, "rejected": row["chosen"]} for row in pairs()]
    outcome = train(method, model_name_or_path=str(QWEN2), rows=rows)
    assert (outcome.status.value, codes(outcome)) == ("refused", {"chosen-equals-rejected"})
    assert "24 of 24" in outcome.findings[0].message


def test_dpo_on_equal_pairs_taken_knowingly_is_stopped_for_its_gradient(train: Trainings) -> None:
    rows = [{**row, "rejected": row["chosen"]} for row in pairs()]
    block = {"guard": {"ignore": ["chosen-equals-rejected"]}}
    outcome = train("dpo", block, model_name_or_path=str(QWEN2), rows=rows)
    assert (outcome.status.value, codes(outcome)) == ("stopped", {"no-gradient"})
    assert not list(train.output.glob("*.safetensors"))


def test_cpo_on_equal_pairs_taken_knowingly_is_stopped_for_its_margin(train: Trainings) -> None:
    rows = [{**row, "rejected": row["chosen"]} for row in pairs()]
    block = {"guard": {"ignore": ["chosen-equals-rejected"]}}
    outcome = train("cpo", block, model_name_or_path=str(QWEN2), rows=rows)
    assert (outcome.status.value, codes(outcome)) == ("stopped", {"no-margin"})


def test_some_equal_and_some_empty_are_reported(train: Trainings) -> None:
    rows = pairs()
    rows[0]["rejected"] = rows[0]["chosen"]
    rows[1]["chosen"] = "  "
    outcome = train("cpo", model_name_or_path=str(QWEN2), rows=rows)
    assert outcome.status.value == "done"
    messages = {item.code: f"{item.subject}: {item.message}" for item in outcome.findings}
    assert set(messages) == {"chosen-equals-rejected", "empty-completions"}
    assert messages["chosen-equals-rejected"].startswith("chosen: 1 of 24")
    assert messages["empty-completions"].startswith("chosen: 1 of 24")


@pytest.mark.parametrize("conversational", [False, True])
def test_empty_messages_are_seen(train: Trainings, conversational: bool) -> None:
    rows = pairs()
    for row in rows:
        row["chosen"] = [{"role": "assistant", "content": ""}] if conversational else ""
        row["rejected"] = [{"role": "assistant", "content": "x"}] if conversational else "x"
        row["prompt"] = [{"role": "user", "content": row["prompt"]}] if conversational else row["prompt"]
    outcome = train("dpo", model_name_or_path=str(QWEN2), rows=rows)
    assert (outcome.status.value, codes(outcome)) == ("refused", {"empty-completions"})


def test_rows_that_are_dropped_are_counted(train: Trainings) -> None:
    rows = pairs()
    for row in rows[:20]:
        row["chosen"] += " indeed" * 60
    outcome = train("reward", model_name_or_path=str(QWEN2), rows=rows, max_length=100)
    assert (outcome.status.value, codes(outcome)) == ("done", {"rows-dropped"})
    assert "20 of 24" in outcome.findings[0].message


def test_no_row_left_is_refused(train: Trainings) -> None:
    outcome = train("reward", model_name_or_path=str(QWEN2), rows=pairs(), max_length=5)
    assert (outcome.status.value, codes(outcome)) == ("refused", {"no-rows"})
    assert (outcome.findings[0].hint or "").startswith("max_length above 5"), "10 drops all of them, too"
    assert "24 of 24" in outcome.findings[0].message


@pytest.mark.parametrize("method", ["sft", "dpo", "cpo", "kto"])
def test_rows_that_are_cut_are_counted(train: Trainings, method: str) -> None:
    rows: list[dict[str, Any]] = {"sft": texts, "kto": labelled}.get(method, pairs)()
    for row in rows[:5]:
        row["text" if method == "sft" else "completion" if method == "kto" else "chosen"] += " indeed" * 60
    outcome = train(method, dry=True, model_name_or_path=str(QWEN2), rows=rows, max_length=100)
    assert (outcome.status.value, codes(outcome)) == ("checked", {"rows-truncated"})
    assert "5 of 24" in outcome.findings[0].message


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("reward", lambda row, at: {**row, "chosen": None if at % 2 else row["chosen"]}, "null in 12 of 24 rows"),
        ("dpo", lambda row, _: {**row, "rejected": 3}, "int in 24 of 24 rows"),
        ("dpo", lambda row, _: {**row, "prompt": [{"role": "user", "content": "x"}]}, "prompt is messages"),
        ("sft", lambda row, _: {"prompt": row["prompt"], "completion": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
def test_values_that_cannot_be_read_are_refused(train: Trainings, method: str, change: Any, said: str) -> None:
    rows = [change(row, at) for at, row in enumerate(pairs())]
    outcome = train(method, model_name_or_path=str(QWEN2), rows=rows)
    assert (outcome.status.value, codes(outcome)) == ("refused", {"values"})
    assert said in outcome.findings[0].message


def test_rows_tokenised_into_blocks_of_max_length_are_not_cut(train: Trainings) -> None:
    rows = [{"input_ids": list(range(3, 19))}] * 16
    assert train("sft", model_name_or_path=str(QWEN2), rows=rows, max_length=16, dry=True).findings == ()
    assert codes(train("sft", model_name_or_path=str(QWEN2), rows=rows, max_length=12, dry=True)) == {"rows-truncated"}


def test_a_tool_call_is_not_empty(train: Trainings) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [{"messages": [{"role": "user", "content": "x"}, call]}] * 8
    outcome = train("sft", model_name_or_path=str(QWEN2), rows=rows, dry=True)
    assert outcome.findings == ()


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("dataset_name", "data/train.jsonl", "datasets: [{path: json, data_files: FILE"),
        ("dataset_name", "./nowhere", "dataset_name: a "),
        ("dataset_test_split", "test", "dataset_test_split: a split that the data has, or eval_strategy: no"),
        ("model_name_or_path", "out/model/here", "dataset_name: a folder that is there"),
        ("model_name_or_path", "data/train.jsonl", "the model's folder, not a file"),
        ("lora_target_modules", ["nope"], "all-linear"),
    ],
)
def test_what_trl_cannot_use_is_its_error_with_our_hint(
    train: Trainings, monkeypatch: pytest.MonkeyPatch, option: str, value: Any, hint: str
) -> None:
    monkeypatch.chdir(train.folder)
    write_rows(Path("data"), texts())
    options = {"model_name_or_path": str(QWEN2), "dataset_name": "data", "eval_strategy": "steps", option: value}
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of whatever type TRL, datasets and transformers raise
        train("sft", **(options if "split" in option else options | {"eval_strategy": "no"}))
    assert train.run is not None
    outcome = train.run.failed(caught.value)
    assert outcome.status.value == "failed"
    assert hint in (outcome.hint or "")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(28, "No space left on device"), "free space"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 118080 vs 117972"), "free space"),
        (ModuleNotFoundError("No module named 'mpi4py'"), "accelerate_config"),
    ],
)
def test_what_a_disk_or_deepspeed_says_has_a_way_out(error: Exception, hint: str) -> None:
    job = TrainingJob(guard=GuardSettings())
    assert hint in (TrainingProcess(job, main_process=False).failed(error).hint or "")

"""Trap 5: CPO and its kin. The pad token, pairs without a preference, and errors of TRL that have a way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lora_tool_train.job import GuardSettings, TrainingJob, TrainingStatus, read_outcomes
from lora_tool_train.logbook import Logbook
from tests.train.running import LLAMA, QWEN2, Trainings, labelled, pairs, texts, write_rows

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


@pytest.mark.parametrize(
    ("method", "rows"),
    [("cpo", pairs()), ("orpo", pairs()), ("dpo", pairs()), ("kto", labelled())],
    ids=["cpo", "orpo", "dpo", "kto"],
)
def test_healthy_runs_pass_without_a_word(
    train: Trainings, padless: Path, method: str, rows: list[dict[str, Any]]
) -> None:
    done = train(method, model_name_or_path=str(padless), rows=rows)
    assert (done.code, done.status, done.report["findings"]) == (0, "done", []), done.error
    saved = load_file(train.output / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert json.loads((train.output / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("method", ["cpo", "dpo", "reward", "orpo"])
def test_pairs_without_a_preference_are_refused(train: Trainings, method: str) -> None:
    rows = [{**row, "rejected": row["chosen"]} for row in pairs()]
    done = train(method, model_name_or_path=str(QWEN2), rows=rows)
    assert (done.code, done.status, done.codes()) == (1, "stopped", {"chosen-equals-rejected"})
    assert "24 of 24" in done.error
    assert not list(train.output.glob("*.safetensors"))


@pytest.mark.parametrize(("method", "code"), [("dpo", "no-gradient"), ("cpo", "no-margin")])
def test_equal_pairs_taken_knowingly_are_stopped_for_what_they_teach(train: Trainings, method: str, code: str) -> None:
    rows = [{**row, "rejected": row["chosen"]} for row in pairs()]
    done = train(method, {"ignore": ["chosen-equals-rejected"]}, model_name_or_path=str(QWEN2), rows=rows)
    assert (done.status, done.codes()) == ("stopped", {code})


def test_some_equal_pairs_are_reported(train: Trainings) -> None:
    rows = pairs()
    rows[0]["rejected"] = rows[0]["chosen"]
    done = train("cpo", model_name_or_path=str(QWEN2), rows=rows)
    assert (done.status, done.codes("warning")) == ("done", {"chosen-equals-rejected"})
    assert done.report["findings"][0]["message"].startswith("1 of 24")


def test_labels_that_are_all_the_same_are_reported(train: Trainings) -> None:
    rows = [{**row, "label": True} for row in labelled()]
    done = train("kto", model_name_or_path=str(QWEN2), rows=rows)
    assert "one-label" in done.codes("warning")


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("dataset_name", "data/train.jsonl", "datasets: [{path: json, data_files: FILE"),
        ("dataset_name", "./nowhere", "dataset_name: a "),
        ("dataset_test_split", "test", "dataset_test_split: a split that the data has, or eval_strategy: no"),
        ("model_name_or_path", "out/model/here", "a folder that is there"),
        ("lora_target_modules", ["nope", "no"], "all-linear"),
        ("lora_target_modules", ["q_proj"], "regular expression: .*q_proj"),
        ("bf16", True, "use_cpu: true and bf16: false"),
    ],
)
def test_what_trl_cannot_use_is_its_error_with_our_hint(
    train: Trainings, monkeypatch: pytest.MonkeyPatch, option: str, value: Any, hint: str
) -> None:
    monkeypatch.chdir(train.folder)
    write_rows(Path("data"), texts())
    options = {"model_name_or_path": str(QWEN2), "dataset_name": "data", option: value}
    if option == "bf16":
        options["use_cpu"] = False
    done = train("sft", **options, eval_strategy="steps" if "split" in option else "no")
    assert (done.code, done.status) == (3, "failed")
    assert hint in done.hint, done.error


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(28, "No space left on device"), "free space"),
        (KeyError("chosen"), "dataset_formats"),
        (
            AttributeError("'Qwen2Model' object has no attribute 'prepare_inputs_for_generation'"),
            "lora_task_type: SEQ_CLS",
        ),
        (RuntimeError("size mismatch for base_model.model.lora_A.default.weight"), "lora_r"),
        (ZeroDivisionError("in a reward function"), None),
    ],
)
def test_an_error_with_a_way_out_needs_no_traceback(tmp_path: Path, error: Exception, hint: str | None) -> None:
    book = Logbook(TrainingJob(guard=GuardSettings(), ours=True), tmp_path)
    assert book.ended_by(error) is (hint is not None)
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.status is TrainingStatus.FAILED
    assert (hint or "") in (outcome.hint or "")
    assert Logbook(TrainingJob(guard=GuardSettings()), tmp_path).ended_by(error) is False  # a script's own is printed

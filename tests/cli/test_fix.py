"""`validate --fix`: each fix is shown, written on request, and answers its finding; weights stay byte for byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.core.errors import SourceChanged
from lora_tool.core.report.json import schema
from lora_tool.execution.fixing import apply_change
from lora_tool.formats.stored import read_part
from lora_tool.verification.validating import validate
from lora_tool.workflows.fixes import planned_changes
from tests.checkpoint_edits import as_classifier, fields
from tests.checkpoint_edits import tensors as weights
from tests.cli.calling import FIXTURES, Caller
from tests.mutations import CAUSAL, MODEL, MUTATIONS, REWARD, break_, copy_of

FIXED = {
    "LT111": "model.safetensors.index.json",
    "LT211 compiled": "adapter_model.safetensors",
    "LT211": None,  # no room for a longer beginning in the header
    "LT211 compiled outside": "adapter_model.safetensors",
    "LT211 DDP": "adapter_model.safetensors",
    "LT211 FSDP": "adapter_model.safetensors",
    "LT211 doubled": "adapter_model.safetensors",
    "LT211 two adapters": None,
    "LT211 raw state beside the saved": None,
    "LT304": "adapter_config.json",
    "LT304 no task": "adapter_config.json",
    "LT304 asked for": None,
    "LT304 base": None,
    "LT306": "config.json",
    "LT308": "config.json",
    "LT308 three": "config.json",
    "LT308 bias": None,
    "LT308 answers": None,
    "LT309": "config.json",
    "LT309 causal": "config.json",
    "LT309 tokenizer": None,
    "LT320": "generation_config.json",
    "LT521": "adapter_config.json",
}
"""Injury → the file in which it is mended; None where nobody can tell how."""


def tensors(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, AdapterDir | ModelDir)
    return {
        name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "").split("base_model.model.")[-1]: (
            tensor.spec.dtype,
            tensor.shape,
            read_part(tensor, 0, tensor.nbytes),
        )
        for name, tensor in checkpoint.tensors.items()
    }


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", FIXED)
def test_a_fix_is_shown_then_written_and_then_there_is_nothing_to_find(name: str, tmp_path: Path, call: Caller) -> None:
    injury, mended = MUTATIONS[name], FIXED[name]
    folder = copy_of(injury.of, tmp_path)
    break_(folder, name)
    options = ["--rm"] if injury.options.get("task") == "reward" else []
    options += ["--base", str(folder.parent / "base")] if injury.with_base else []
    before, held = content(folder), tensors(folder)

    shown = call("validate", folder, *options, "--fix", "--json")
    assert injury.code in {finding["code"] for finding in shown.json["findings"]}
    assert content(folder) == before  # nothing is written
    assert [Path(fix["path"]).name for fix in shown.json["fixes"]] == ([mended] if mended else [])
    done = call("validate", folder, *options, "--fix", "--apply", "--json")
    if mended is None:
        assert content(folder) == before
        assert done.json["findings"] == shown.json["findings"]
        return
    assert done.json["findings"] == [], name
    assert done.code == 0
    (fix,) = done.json["fixes"]
    assert injury.code in fix["codes"]
    assert fix["diff"] == shown.json["fixes"][0]["diff"]
    after = content(folder)
    assert after.pop(f"{mended}.orig") == before[mended]
    assert {file for file in after if after[file] != before[file]} == {mended}
    assert tensors(folder) == held
    assert call("validate", folder, *options, "--fix").out.endswith("--fix has nothing to change\n")


def test_the_text_says_what_to_type_and_what_was_done(tmp_path: Path, call: Caller) -> None:
    folder = copy_of(MODEL, tmp_path)
    break_(folder, "LT308")
    shown = call("validate", folder, "--fix")
    assert shown.code == 1
    assert '\n+    "0": "LABEL_0"\n' in shown.out
    assert shown.out.endswith("--fix --apply would change 1 file for LT308, and keep each original as FILE.orig\n")
    done = call("validate", folder, "--fix", "--apply")
    assert done.code == 0
    assert f"changed {folder / 'config.json'}; the original is config.json.orig\n" in done.out
    assert "no findings" in done.out
    assert call("validate", folder, "--apply").code == 2
    assert "+++" in call("validate", folder, "--fix", "--format", "junit").err + "+++"


def test_peft_and_transformers_load_what_was_fixed(
    tmp_path: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install lora-tool[merge]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name in ("LT304", "LT211 compiled", "LT521"):
        folder = copy_of(MUTATIONS[name].of, tmp_path / name)
        break_(folder, name)
        assert call("validate", folder, "--fix", "--apply").code == 0
        with fields(folder) as config:
            base, task = config["base_model_name_or_path"], config["task_type"]
        assert Path(base).is_absolute() is (name == "LT521")
        monkeypatch.chdir(folder)  # from where PEFT takes the base's path
        kind = "AutoModelForSequenceClassification" if task == "SEQ_CLS" else "AutoModelForCausalLM"
        more = {"num_labels": 1} if task == "SEQ_CLS" else {}
        model = getattr(transformers, kind).from_pretrained(base, **more)
        loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(model, folder))
        file = tensors(folder)
        assert {key.removeprefix("base_model.model.") for key in loaded} == file.keys(), name
        for key, value in loaded.items():
            kept = torch.frombuffer(bytearray(file[key.removeprefix("base_model.model.")][2]), dtype=value.dtype)
            assert torch.equal(value.flatten(), kept), key
    folder = copy_of(MODEL, tmp_path / "model")
    as_classifier(folder, labels=2, pad=None)
    with fields(folder, "config.json") as config:
        config["num_labels"] = 2
    assert call("validate", folder, "--fix", "--apply").code == 0
    reward, seen = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert (reward.config.num_labels, reward.config.pad_token_id) == (1, 0)
    assert not seen["mismatched_keys"]
    assert not seen["missing_keys"]


def test_json_of_another_make_keeps_what_it_says(tmp_path: Path, call: Caller) -> None:
    folder = copy_of(MODEL, tmp_path)
    as_classifier(folder, labels=None)
    config = folder / "config.json"
    said = {**json.loads(config.read_text()), "half": "\ud800", "letter": "é", "zz": [1e-06, None]}
    config.write_text(json.dumps(said).replace(", ", " ,\n  "))
    assert call("validate", folder, "--fix", "--apply").code == 0
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert json.loads(config.read_text()) == {**said, **labels}


def test_the_schema_has_them(tmp_path: Path, call: Caller) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install lora-tool[dev]")
    folder = copy_of(MODEL, tmp_path)
    break_(folder, "LT308")
    for words in ((), ("--apply",)):
        fixes = call("validate", folder, "--fix", *words, "--json").json
        jsonschema.validate(fixes, schema())
        jsonschema.validate(
            fixes["fixes"], {**schema()["properties"]["fixes"], "$defs": schema()["$defs"], "minItems": 1}
        )


def test_num_labels_wins_as_in_transformers(tmp_path: Path, call: Caller) -> None:
    folder = copy_of(MODEL, tmp_path)
    as_classifier(folder)
    with fields(folder, "config.json") as config:
        config["num_labels"] = 2
        config["id2label"], config["label2id"] = {"0": "how good"}, {"how good": 0}
    found = call("validate", folder, "--json").json["findings"]
    assert [(each["code"], each["subject"]) for each in found] == [("LT308", "num_labels")]
    assert call("validate", folder, "--fix", "--apply").code == 0
    with fields(folder, "config.json") as config:
        assert (config["num_labels"], config["id2label"]) == (1, {"0": "how good"})


def test_labels_that_somebody_named_are_left(tmp_path: Path) -> None:
    folder = copy_of(MODEL, tmp_path)
    as_classifier(folder, labels=3)
    with fields(folder, "config.json") as config:
        config["id2label"] = {"0": "bad", "1": "fair", "2": "good"}
    assert not planned_changes(validate(folder))


def test_a_head_of_several_rows_needs_somebody_to_say_what_it_is(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    folder = copy_of(REWARD, tmp_path)
    file = folder / "adapter_model.safetensors"
    table = load_file(file)
    table["base_model.model.score.weight"] = np.zeros((3, 16), np.float32)
    save_file(table, file, {"format": "pt"})
    break_(folder, "LT304")
    report = validate(folder, deep=False)
    assert not planned_changes(report)
    assert [change.codes for change in planned_changes(report, task="seq-cls")] == [("LT304",)]
    with fields(folder) as config:
        own = {"base_model_class": "Qwen2ForTokenClassification", "parent_library": "transformers.models.qwen2"}
        config["auto_mapping"] = own
    (change,) = planned_changes(validate(folder, deep=False))
    assert b'"task_type": "TOKEN_CLS"' in change.new


def test_a_base_of_that_name_that_does_not_fit_is_not_taken(tmp_path: Path, call: Caller) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    break_(folder, "LT521")
    base = folder.parent / "llama"
    as_classifier(base)
    with weights(base, "model.safetensors") as table:
        for name in [name for name in table if ".layers.1." in name]:
            del table[name]
    report = validate(folder)
    assert {finding.code for finding in report.findings} == {"LT521"}
    assert not planned_changes(report)
    assert f"hint: lora-tool merge {folder} --base {base}\n" in call("merge", folder).err
    shutil.copytree(base, tmp_path / "llama")  # two of that name: nobody can tell
    assert not validate(folder).findings


def test_a_copy_is_never_overwritten_and_keeps_its_mode(tmp_path: Path, call: Caller) -> None:
    folder = copy_of(MODEL, tmp_path)
    break_(folder, "LT308")
    config = folder / "config.json"
    config.chmod(0o640)
    (folder / "config.json.orig").write_text("mine")
    before = config.read_bytes()
    assert call("validate", folder, "--fix", "--apply").code == 0
    assert (folder / "config.json.orig").read_text() == "mine"
    assert (folder / "config.json.orig2").read_bytes() == before
    assert config.stat().st_mode & 0o777 == 0o640
    assert not list(folder.glob(".*partial"))


def test_a_file_that_changed_meanwhile_is_left(tmp_path: Path) -> None:
    folder = copy_of(MODEL, tmp_path)
    break_(folder, "LT308")
    (change,) = planned_changes(validate(folder))
    with fields(folder, "config.json") as config:
        config["hidden_size"] = 17
    with pytest.raises(SourceChanged):
        apply_change(change)
    assert not list(folder.glob("*.orig*"))


def test_what_a_link_leads_to_is_not_changed(tmp_path: Path, call: Caller) -> None:
    """As in the Hub's cache, where a snapshot is links into `blobs`."""
    folder = copy_of(MODEL, tmp_path)
    break_(folder, "LT308")
    cache = tmp_path / "models--me--x"
    (cache / "blobs").mkdir(parents=True)
    shutil.move(folder, cache / "snapshots" / ("0" * 40))
    snapshot = cache / "snapshots" / ("0" * 40)
    blob = cache / "blobs" / ("1" * 64)
    (snapshot / "config.json").rename(blob)
    (snapshot / "config.json").symlink_to(os.path.relpath(blob, snapshot))
    done = call("validate", snapshot, "--fix", "--apply")
    assert (done.code, "LT308" in done.out) == (1, True)
    assert (snapshot / "config.json").is_symlink()
    assert json.loads(blob.read_text()).get("id2label") is None


def test_every_checkpoint_of_a_run_is_fixed(tmp_path: Path, call: Caller) -> None:
    run = tmp_path / "run"
    for step in (2, 4):
        shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", run / f"checkpoint-{step}")
        break_(run / f"checkpoint-{step}", "LT304")
    done = call("validate", run, "--fix", "--apply", "--json")
    assert [Path(fix["kept"]).parent.name for fix in done.json["fixes"]] == ["checkpoint-2", "checkpoint-4"]
    assert "LT304" not in {finding["code"] for finding in done.json["findings"]}

"""What the rules say, and where they must keep quiet though something looks odd."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool.checkpoints import open_checkpoint
from lora_tool.core.errors import CheckpointError
from lora_tool.core.report import Finding, Report, Severity
from tests import checkpoint_edits as edit
from tests.checkpoint_edits import CONFIG, PREFIX, WEIGHTS, Tensors, emptied, fields, lora, raw, tensors
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, MODEL, REWARD, RUN, SHARDED, break_, copy_of
from tests.mutations.places import SCORE


def _only(report: Report, code: str) -> Finding:
    (found,) = (finding for finding in report.findings if finding.code == code)
    return found


def test_zero_size_points_at_the_training_state(tmp_path: Path) -> None:
    folder = copy_of(RUN, tmp_path)
    break_(folder, "LT206 in a run")
    found = next(finding for finding in judge(folder).findings if finding.code == "LT206")
    assert str(folder / "global_step2") in (found.hint or "")


def test_zero_size_points_at_the_pickle_beside_it(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    break_(folder, "LT206 one factor")
    names = [finding.subject for finding in judge(folder).findings if finding.code == "LT206"]
    for content, is_told in (
        ({}, False),
        (dict.fromkeys(names, torch.ones(0)), False),
        (dict.fromkeys(names, torch.ones(2, 2)), True),
    ):
        torch.save(content, folder / "adapter_model.bin")
        hint = _only(judge(folder), "LT206").hint or ""
        assert ("adapter_model.bin beside it has all values" in hint) is is_told


def test_a_token_classifier_needs_no_pad_token(tmp_path: Path) -> None:
    folder = copy_of(MODEL, tmp_path)
    edit.as_classifier(folder)
    for name, warned in (("Qwen2ForSequenceClassification", True), ("Qwen2ForTokenClassification", False)):
        with fields(folder, "config.json") as config:
            config |= {"architectures": [name], "pad_token_id": None}
        assert ("LT306" in codes(judge(folder))) is warned


@pytest.mark.parametrize(
    ("name", "null", "severity"),
    [("hidden_size", True, Severity.ERROR), ("num_hidden_layers", False, Severity.WARNING)],
)
def test_a_size_that_the_config_leaves_out_is_told(
    name: str, severity: Severity, tmp_path: Path, *, null: bool
) -> None:
    folder = copy_of(MODEL, tmp_path)
    with fields(folder, "config.json") as config:
        del config[name]
        config.update({name: None} if null else {})
    found = _only(judge(folder), "LT317")
    assert (found.subject, found.severity) == (name, severity)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers_to_transform", [0]), ("exclude_modules", ["q_proj"]), ("modules_to_save", ["q_proj"])],
)
def test_the_field_that_leaves_a_module_out_is_named(field: str, value: list[Any], tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with fields(folder) as config:
        config[field] = value
    found = next(finding for finding in judge(folder).findings if finding.code == "LT207")
    assert found.message.startswith(f"`{field}` leaves its module out: PEFT would silently drop it; ")
    assert f"correct `{field}` in {folder / CONFIG}" in (found.hint or "")


def test_targets_of_pefts_own_choice_are_one_finding(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with fields(folder) as config:
        config["target_modules"] = None
    assert "takes its default modules" in _only(judge(folder), "LT207").message
    with fields(folder) as config:
        config["target_parameters"] = ["mlp.down_proj.weight"]
    found = [finding.message for finding in judge(folder).findings if finding.code == "LT207"]
    assert found
    assert all("of `target_modules` or `target_parameters` matches" in message for message in found)


def test_a_layer_that_two_fields_name_is_wrong(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with fields(folder) as config:
        config["target_parameters"] = ["q_proj.weight"]
    found = _only(judge(folder), "LT205")
    assert found.severity is Severity.ERROR
    assert "PEFT fails to load" in found.message


def test_names_in_one_string_are_to_be_a_list(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with fields(folder) as config:
        config["target_modules"] = "q_proj,v_proj,down_proj"
    assert "write the names as a list" in (_only(judge(folder), "LT205").hint or "")


def test_adapters_of_peft_list_two_heads_and_have_one(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    assert json.loads((folder / CONFIG).read_text())["modules_to_save"] == ["classifier", "score"]
    assert lines(judge(folder)) == []


def test_a_lost_head_is_only_a_warning_where_the_base_has_one(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    break_(folder, "LT301")
    edit.as_classifier(folder.parent / "base")
    assert _only(judge(folder, base=folder.parent / "base"), "LT301").severity is Severity.WARNING


def test_without_a_task_type_the_head_of_the_base_is_kept_and_may_be_there(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    break_(folder, "LT301 trained without a task type")
    base = (folder.parent / "base").rename(folder.parent / "elsewhere")
    assert _only(judge(folder), "LT301").severity is Severity.WARNING
    edit.as_classifier(base)
    assert lines(judge(folder, base=base)) == []


def test_a_lost_head_is_looked_for_in_the_training_checkpoint_nearby(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    break_(folder, "LT301")
    (folder / "global_step5").mkdir()
    (folder / "global_step5" / "mp_rank_00_model_states.pt").touch()
    assert (_only(judge(folder), "LT301").hint or "").endswith(f"lora-tool consolidate {folder}")


def test_lora_on_a_head_that_the_adapter_carries_is_fine(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    break_(folder, "LT302")
    with tensors(folder) as table:
        table[f"{PREFIX}score.base_layer.weight"] = raw(1, 16)
    assert "LT302" not in codes(judge(folder))


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_good_classifier_is_silent(labels: int, tmp_path: Path) -> None:
    folder = copy_of(MODEL, tmp_path)
    edit.as_classifier(folder, labels=None if labels == 2 else labels, rows=labels)
    assert lines(judge(folder)) == []


_INCOMPARABLE: dict[str, dict[str, Any]] = {
    "unknown architecture": {"model_type": "llava_new"},
    "quantised": {"quantization_config": {"quant_method": "hqq"}},
    "custom code": {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
    "broken": {},
}


@pytest.mark.parametrize("change", _INCOMPARABLE)
def test_a_base_whose_names_cannot_tell_is_skipped(change: str, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    base = folder.parent / "base"
    with tensors(folder) as table:  # would be LT501 against a base that can be compared
        table.update(lora("model.layers.0.cross_attn.q_proj", rows=16, columns=16))
    with fields(base, "config.json") as config:
        config.update(_INCOMPARABLE[change])
    if change == "broken":
        (base / "model-00002-of-00002.safetensors").unlink()
    report = judge(folder, base=base)
    assert not {code for code in codes(report) if code.startswith("LT5")}
    assert {skip.code for skip in report.skipped} >= {
        "LT317",
        "LT318",
        *(f"LT50{at}" for at in range(1, 7)),
        "LT508",
        "LT509",
        "LT513",
        "LT514",
        "LT515",
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("unknown architecture", {"lora-tool has no table of the tensors of llava_new models"}),
        ("quantised", {"the weights are quantised (hqq): their names and shapes are not those of the class"}),
        ("custom code", {"the model's class is custom code, so lora-tool does not know its tensors"}),
        (None, set()),
    ],
)
def test_a_class_whose_tensors_are_not_known_is_told(change: str | None, why: set[str], tmp_path: Path) -> None:
    folder = copy_of(MODEL, tmp_path)
    with fields(folder, "config.json") as config:
        config.update(_INCOMPARABLE[change] if change else {})
    told = [skip for skip in judge(folder).skipped if skip.code in ("LT317", "LT318", "LT319")]
    assert {skip.reason for skip in told} == why
    assert len(told) == (3 if change else 0)
    assert not codes(judge(folder)) & {"LT317", "LT318", "LT319"}


def test_a_layer_beside_the_head_that_no_class_of_the_base_has_is_named(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    with tensors(folder) as table:
        table[f"{PREFIX}pre_classifier.weight"] = raw(16, 16)
    assert codes(judge(folder, base=folder.parent / "base")) == {"LT506"}


def test_a_base_without_the_first_component_is_matched(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    base = folder.parent / "base"
    for shard in base.glob("model-*.safetensors"):
        edit.write(shard, {name.removeprefix("model."): tensor for name, tensor in edit.read(shard).items()})
    with fields(base, edit.INDEX) as index:
        index["weight_map"] = {name.removeprefix("model."): file for name, file in index["weight_map"].items()}
    assert lines(judge(folder, base=base)) == []


def test_tied_output_layers_may_be_absent_from_the_base(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    with tensors(folder) as table:
        del table[SCORE]
        table.update(lora("lm_head", rows=304, columns=16))
        table[f"{PREFIX}lm_head.base_layer.weight"] = raw(304, 16)
    with fields(folder) as config:
        config |= {"task_type": "CAUSAL_LM", "modules_to_save": None}
        config["target_modules"].append("lm_head")
    assert codes(judge(folder, base=folder.parent / "base")) == {"LT508"}  # a warning, of what merge refuses


def test_added_tokens_are_noted_and_half_added_ones_are_wrong(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    base = folder.parent / "base"
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(310, 16)
    assert codes(judge(folder, base=base)) == {"LT504"}
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.weight"] = raw(310, 16)
    report = judge(folder, base=base)
    assert lines(report) == []
    assert "LT504" in codes(report, Severity.INFO)


def test_hundreds_of_checkpoints_of_a_run_are_judged_each(tmp_path: Path) -> None:
    folder = copy_of(RUN, tmp_path)
    break_(folder, "LT301")
    report = judge(folder.parent)
    assert {Path(found.path).parent.name for found in report.at_least(Severity.ERROR)} == {"checkpoint-2"}


@pytest.mark.parametrize("seed", range(8))
def test_no_rule_stumbles_over_a_mangled_adapter(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    folder = copy_of(rng.choice([CAUSAL, REWARD]), tmp_path)
    odd = [None, [], {}, "", "(", 0, -1, 1e400, True, [None], {"a": None}, "x" * 200]
    with fields(folder) as config:
        for name in rng.sample(sorted(config), 4):
            config[name] = rng.choice(odd)
    table = edit.read(folder / WEIGHTS)
    shapes = [(), (0,), (4,), (1, 1), (2, 3, 4), (0, 5), (16, 16)]
    names = ["", ".", "lora_A", f"{PREFIX}.lora_A.weight", f"{PREFIX}lora_B", f"{PREFIX}score", "é.lora_A..weight"]
    for name in rng.sample(sorted(table), 4):
        table[name] = raw(*rng.choice(shapes), dtype=rng.choice(["F32", "BF16", "I8"]))
    for name in rng.sample(names, 3):
        table[name] = raw(*rng.choice(shapes))
    edit.write(folder / WEIGHTS, table)
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return
    assert judge(folder, base=folder.parent / "base", task=rng.choice([None, "reward", "causal-lm"])).findings


def test_a_head_that_stayed_frozen_is_the_bases(tmp_path: Path) -> None:
    """Without a task type PEFT saves no head, and takes the one of the model that it is given."""
    folder = copy_of(REWARD, tmp_path)
    break_(folder, "LT301 by class")
    base = (folder.parent / "base").rename(folder.parent / "elsewhere")
    assert _only(judge(folder), "LT301").severity is Severity.WARNING
    assert _only(judge(folder, base=base), "LT301").severity is Severity.ERROR
    edit.as_classifier(base)
    assert lines(judge(folder, base=base)) == []


def test_a_head_of_another_size_takes_the_place_of_the_bases(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    edit.as_classifier(folder.parent / "base", labels=3, rows=3)
    found = _only(judge(folder, base=folder.parent / "base"), "LT303")
    assert found.severity is Severity.WARNING
    assert "num_labels=1" in found.message


@pytest.mark.parametrize("kind", ["ADALORA", "OFT", "IA3"])
def test_an_adapter_of_another_kind_is_one_finding(kind: str, tmp_path: Path) -> None:
    """Its fields mean something else, and so do tensors that are called as LoRA's are."""
    folder = copy_of(CAUSAL, tmp_path)
    with tensors(folder) as table:
        for name in [name for name in table if "lora_B" in name]:
            del table[name]
    with fields(folder) as config:
        config.update(peft_type=kind, r=0, lora_alpha=None, layers_pattern={"a": 1})
    report = judge(folder, base=folder.parent / "base")
    assert codes(report) == {"LT217"}
    assert {"LT201", "LT203", "LT208"} <= {skip.code for skip in report.skipped}


@pytest.mark.parametrize(("where", "found"), [("mlp.", Severity.WARNING), ("mlp.experts.0.", Severity.INFO)])
def test_experts_that_no_token_reached_are_no_warning(where: str, found: Severity, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with tensors(folder) as table:
        for name in [name for name in table if ".layers.0." in name]:
            tensor = table.pop(name)
            moved = name.replace("self_attn.", where).replace("mlp.down", f"{where}down")
            zero = edit.Raw(tensor.dtype, tensor.shape, bytes(len(tensor.data)))
            table[moved] = zero if "lora_B" in name else tensor
    (finding,) = judge(folder, select=["LT208"]).findings
    assert finding.severity is found
    assert "and so are 2 more of the adapter's 6: these modules were not trained" in finding.message


@pytest.mark.parametrize("declared", [True, False])
def test_lora_that_the_config_declares_is_part_of_the_model(declared: bool, tmp_path: Path) -> None:
    base = copy_of(SHARDED, tmp_path)
    table: edit.Tensors = {}
    for shard in sorted(base.glob("model-*.safetensors")):
        table |= edit.read(shard)
        shard.unlink()
    (base / edit.INDEX).unlink()
    for name in [name for name in table if name.endswith("q_proj.weight")]:
        path = name.removesuffix(".weight")
        table[f"{path}.base_layer.weight"] = table.pop(name)
        table |= {f"{path}.lora_{half}.vision.weight": raw(4, 4) for half in "AB"}
    edit.write(base / "model.safetensors", table)
    with fields(base, "config.json") as config:
        config.update({"vision_lora": {"r": 4}} if declared else {})
    assert ("LT601" in codes(judge(base))) is not declared


@pytest.mark.parametrize(
    ("code", "injury"),
    [
        ("LT206", lambda table: {name: emptied(each) for name, each in table.items()}),
        ("LT211", lambda table: {f"_orig_mod.{name}": each for name, each in table.items()}),
        ("LT201", lambda table: {name: each for name, each in table.items() if "lora_A" in name}),
        ("LT503", lambda table: {name.replace(".layers.", ".layers.7"): each for name, each in table.items()}),
    ],
)
def test_many_tensors_with_one_fault_are_one_finding(
    code: str, injury: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with tensors(folder) as table:
        changed = injury(table)
        table.clear()
        table.update(changed)
    (found,) = (each for each in judge(folder, base=folder.parent / "base").findings if each.code == code)
    assert " others are like it: `" in found.message

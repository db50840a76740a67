"""Each reason for which planning a merge refuses: the class of the error, and the words that name file and tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import FindingsFound, LoraToolError, MissingDependency, OnlyInMemory, UnsupportedAdapter
from lora_tool.core.tensors import DType
from lora_tool.execution.engine import execute
from lora_tool.execution.kernels import STORAGE
from lora_tool.plans.core.plan import Plan
from tests import checkpoint_edits as edit
from tests.property.interpret import load
from tests.property.strategies import write_weights

pytestmark = pytest.mark.usefixtures("typed_hints")
FIXTURES = Path(__file__).parents[2] / "fixtures"
P = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Case:
    """A copied fixture, its adapter's tensors and both configs open for changes."""

    root: Path
    tensors: Arrays
    config: dict[str, Any]
    model: dict[str, Any]

    def plan(self, **choices: Any) -> Plan:
        write_weights(self.root / "adapter" / "adapter_model.safetensors", self.tensors)
        (self.root / "adapter" / "adapter_config.json").write_text(json.dumps(self.config))
        (self.root / "base" / "config.json").write_text(json.dumps(self.model))
        adapter = open_checkpoint(self.root / "adapter")
        assert isinstance(adapter, AdapterDir)
        return plan_merge(open_model(self.root / "base"), adapter, **choices)

    def rename(self, old: str, new: str) -> None:
        self.tensors = {name.replace(old, new): array for name, array in self.tensors.items()}


def widened(tensor: Any) -> np.ndarray[Any, Any]:
    return load(tensor).astype(STORAGE[tensor.dtype])


def case(folder: Path, fixture: str) -> Case:
    shutil.copytree(FIXTURES / fixture, folder / "case")
    adapter = open_checkpoint(folder / "case" / "adapter")
    assert isinstance(adapter, AdapterDir)
    return Case(
        root=folder / "case",
        tensors={tensor.name: widened(tensor) for tensor in adapter.tensors.values()},
        config=json.loads((folder / "case" / "adapter" / "adapter_config.json").read_text()),
        model=json.loads((folder / "case" / "base" / "config.json").read_text()),
    )


Change = Callable[[Case], Any]
Refusal = tuple[Change, type[LoraToolError] | str, str]
REFUSALS: dict[str, Refusal] = {}


def refusal(error: type[LoraToolError] | str, pattern: str) -> Callable[[Change], Change]:
    """Register a change to the causal fixture with the refusal that it must cause: an error, or a rule's code."""

    def register(change: Change) -> Change:
        REFUSALS[change.__name__] = (change, error, pattern)
        return change

    return register


@refusal(OnlyInMemory, r"LoRA on convolutions: .* has shape \[4, 16, 1\]")
def three_dimensions(case: Case) -> None:
    name = f"{P}{Q0}.lora_A.weight"
    case.tensors[name] = case.tensors[name][:, :, None]
    name = f"{P}{Q0}.lora_B.weight"
    case.tensors[name] = case.tensors[name][:, :, None]
    case.model["model_type"] = "our_own"
    with edit.tensors(case.root / "base", "model-00001-of-00002.safetensors") as table:
        table |= {name: edit.raw(16, 16, 1) for name in table if name.endswith("q_proj.weight")}


@refusal("LT505", r"mlp.up_proj`: `target_parameters` names 1 parameter of it in .*base, but LoRA is on 0")
def incomplete_parameters(case: Case) -> None:
    case.config["target_parameters"] = ["mlp.up_proj.weight"]


@refusal("LT502", r"lora_B·lora_A is \[310, 16\], but the adapter's own `.*base_layer.weight` is \[312, 16\]")
def carried_of_another_height(case: Case) -> None:
    case.config["target_modules"].append("embed_tokens")
    case.tensors |= {
        f"{P}model.embed_tokens.lora_embedding_A": np.ones((4, 310), np.float32),
        f"{P}model.embed_tokens.lora_embedding_B": np.ones((16, 4), np.float32),
        f"{P}model.embed_tokens.base_layer.weight": np.ones((312, 16), np.float32),
    }


@refusal("LT304", r"is a `value_head` head, but task_type is CAUSAL_LM")
def saved_without_a_home(case: Case) -> None:
    case.config["modules_to_save"] = ["value_head"]
    case.tensors[f"{P}value_head.weight"] = np.ones((1, 16), np.float32)


@refusal("LT501", r"adapts `model.layers.0.mlp.down_proj`, which .*base does not have")
def unknown_architecture(case: Case) -> None:
    case.model["model_type"] = "mixtral"


@refusal(UnsupportedAdapter, r"a mine is code in the checkpoint \(`auto_map`\), which lora-tool does not run")
def own_code(case: Case) -> None:
    case.model |= {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "model_type": "mine"}


@refusal(UnsupportedAdapter, r"quantised \(aqlm\)")
def quantised(case: Case) -> None:
    case.model["quantization_config"] = {"quant_method": "aqlm"}


for _name, _value, _words in (
    ("init_lora_weights", "pissa_niter_16", "randomised SVD changes the base differently"),
    ("init_lora_weights", "corda", "`init_lora_weights` corda"),
    ("init_lora_weights", "lora_ga", "gradients that are not in the adapter"),
    ("init_lora_weights", "of-next-year", "no PEFT up to 0.21 has this init"),
    ("layer_replication", [[0, 2]], "`layer_replication`"),
    ("alora_invocation_tokens", [1, 2], "`alora_invocation_tokens`"),
    ("use_qalora", True, "`use_qalora`"),
    ("megatron_config", {"a": 1}, "`megatron_config`"),
    ("nvfp4_merge_aware", {"version": "1"}, "`nvfp4_merge_aware`"),
):
    REFUSALS[f"{_name}-{_value}"] = (
        lambda case, name=_name, value=_value: case.config.update({name: value}),  # type: ignore[misc]
        UnsupportedAdapter,
        re.escape(_words),
    )


for _value in ("LOHA", "PREFIX_TUNING", "lora"):
    REFUSALS[f"peft_type-{_value}"] = (
        lambda case, value=_value: case.config.update({"peft_type": value}),  # type: ignore[misc]
        "LT217",
        f"expected LORA, found {_value}",
    )


@pytest.mark.parametrize(("change", "error", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_it_is_refused_by_name(change: Change, error: type[LoraToolError] | str, pattern: str, tmp_path: Path) -> None:
    broken = case(tmp_path, "causal-llama")
    change(broken)
    kind = FindingsFound if isinstance(error, str) else error
    with pytest.raises(kind, match=pattern) as caught:
        broken.plan()
    assert type(caught.value) is kind
    assert isinstance(error, type) or str(caught.value).startswith(error)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.hint


def test_the_fixtures_themselves_are_planned(tmp_path: Path) -> None:
    assert case(tmp_path / "a", "causal-llama").plan().counts()["merged"] == 6
    assert case(tmp_path / "b", "reward-qwen2").plan().counts()["added"] == 1


@pytest.mark.parametrize(
    ("fixture", "choices", "words"),
    [
        (
            "causal-llama",
            {"task": "reward"},
            "LT304 .*a reward model was requested, but this is the adapter of a causal LM",
        ),
        ("causal-llama", {"task": "seq-cls"}, "LT304 .*a reward model was requested"),
        (
            "reward-qwen2",
            {"task": "causal-lm"},
            "LT304 .*a causal LM was requested, but this is the adapter of a sequence",
        ),
        ("reward-qwen2", {"num_labels": 2}, "LT303 .*score.weight`: has 1 row, but 2 labels are requested"),
    ],
)
def test_what_was_asked_for_may_not_contradict_what_is_there(
    fixture: str, choices: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(FindingsFound, match=words):
        case(tmp_path, fixture).plan(**choices)


def test_a_head_of_several_rows_is_no_reward_head(tmp_path: Path) -> None:
    several = case(tmp_path, "reward-qwen2")
    several.tensors[f"{P}score.weight"] = np.ones((5, 16), np.float32)
    assert several.plan(task="seq-cls").manifest["num_labels"] == 5
    with pytest.raises(FindingsFound, match="LT303 .*has 5 rows"):
        several.plan(task="reward")


def test_lora_on_a_head_that_was_never_saved_is_named(tmp_path: Path) -> None:
    lost = case(tmp_path, "reward-qwen2")
    del lost.tensors[f"{P}score.weight"]
    lost.config["target_modules"].append("score")
    lost.config["modules_to_save"] = None
    lost.tensors |= {
        f"{P}score.lora_A.weight": np.ones((4, 16), np.float32),
        f"{P}score.lora_B.weight": np.ones((1, 4), np.float32),
    }
    with pytest.raises(
        FindingsFound, match="LT302 .*LoRA on `score`, but its frozen weight is neither in the file nor in"
    ):
        lost.plan()


def test_without_a_task_type_the_head_tells_the_task(tmp_path: Path) -> None:
    untold = case(tmp_path, "reward-qwen2")
    untold.config["task_type"] = None
    assert untold.plan().manifest["task"] == "seq-cls"
    with pytest.raises(FindingsFound, match="LT304 .*is a `score` head, but task_type is not set"):
        untold.plan(task="causal-lm")


def test_an_adapter_is_not_merged_twice_into_one_model(tmp_path: Path) -> None:
    once = case(tmp_path, "causal-llama")
    merged = execute(once.plan(), tmp_path / "merged")
    adapter = open_checkpoint(once.root / "adapter")
    assert isinstance(adapter, AdapterDir)
    with pytest.raises(FindingsFound, match="LT511 .*is a merged model that already contains this adapter"):
        plan_merge(open_model(merged), adapter)
    other = case(tmp_path / "other", "causal-llama")
    other.tensors[f"{P}{Q0}.lora_B.weight"] = other.tensors[f"{P}{Q0}.lora_B.weight"] * 2
    shutil.rmtree(other.root / "base")
    shutil.copytree(merged, other.root / "base")
    assert len(other.plan().manifest["merged_adapters"]) == 2


def test_an_adapter_of_a_quantised_base_says_how_a_plain_one_differs(tmp_path: Path) -> None:
    small = case(tmp_path, "causal-llama")
    assert not any("whose name says that it is quantised" in note for note in small.plan().notes)
    small.config["base_model_name_or_path"] = "unsloth/causal-llama-bnb-4bit"
    (note,) = (note for note in small.plan(ignore=["LT520"]).notes if "whose name says that it is quantised" in note)
    assert "was trained on unsloth/causal-llama-bnb-4bit" in note


def test_floats_of_eight_bits_need_a_scale(tmp_path: Path) -> None:
    small = case(tmp_path, "causal-llama")
    with edit.tensors(small.root / "base", "model-00002-of-00002.safetensors") as table:
        table["model.norm.weight"] = edit.Raw("F8_E4M3", (16,), bytes(16))
    small.model["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(
        FindingsFound, match=r"LT322 .*model-00002.*: `model.norm.weight`: is F8_E4M3, but has no scale"
    ):
        small.plan()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("rope_scaling", {"rope_type": "linear"}, "LT324 .*factor"),
        ("dtype", "float17", "LT214"),
    ],
)
def test_a_config_that_transformers_does_not_load_is_merged_into_no_model(
    field: str, value: object, code: str, tmp_path: Path
) -> None:
    small = case(tmp_path, "causal-llama")
    small.model[field] = value
    with pytest.raises(FindingsFound, match=code):
        small.plan()


def test_a_missing_pad_token_is_a_warning(tmp_path: Path) -> None:
    silent = case(tmp_path, "reward-qwen2")
    for path in [*(silent.root / "adapter").glob("tokenizer*"), *(silent.root / "base").glob("tokenizer*")]:
        path.unlink()
    silent.model.pop("pad_token_id", None)
    (warning,) = silent.plan().warnings
    assert "no pad_token_id" in warning
    silent.model["pad_token_id"] = 3
    assert silent.plan().warnings == ()


def test_another_dtype_is_cast_and_said_so(tmp_path: Path) -> None:
    plan = case(tmp_path, "causal-llama").plan(dtype=DType.F32)
    assert {step.out.dtype for step in plan.steps} == {DType.F32}
    assert "copied" not in plan.counts()
    (config,) = (file for file in plan.side_files if file.filename == "config.json")
    assert json.loads(config.content or b"")["dtype"] == "float32"


def test_two_plans_of_the_same_inputs_are_equal(tmp_path: Path) -> None:
    once = case(tmp_path, "causal-llama")
    first = once.plan()
    adapter = open_checkpoint(once.root / "adapter")
    assert isinstance(adapter, AdapterDir)
    assert plan_merge(open_model(once.root / "base"), adapter) == first
    assert "q_proj" in str(first)


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (None, "'lora-tool[merge]'"),
        ('{"url": "file:///a%20clone", "dir_info": {"editable": true}}', "-e '/a clone[merge]'"),
        ('{"url": "file:///wheels/clone", "dir_info": {}}', "'/wheels/clone[merge]'"),
        ('{"url": "https://a.org/b", "vcs_info": {"vcs": "git"}}', "'lora-tool[merge] @ git+https://a.org/b'"),
    ],
)
def test_a_missing_extra_is_installed_from_where_lora_tool_came(
    origin: str | None, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "lora_tool-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lora-tool\nVersion: 9.9\n")
    if origin is not None:
        (installed / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert MissingDependency("torch", extra="merge").hint == f"pip install {named}"


def test_a_missing_extra_says_which_python_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 10, 13))
    assert "Python 3.11" in (MissingDependency("torch", extra="merge").hint or "")
    assert "Python" not in (MissingDependency("jinja2", extra="plot").hint or "")

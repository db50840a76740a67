"""The files of sentence-transformers that go with an embedding model: byte for byte, from the right folder, or said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import CorruptFile
from lora_tool.execution.engine import execute
from lora_tool.formats.manifest import FILE_NAME
from lora_tool.hub.contents import select
from lora_tool.plans.core.plan import Plan
from tests.oracle.adapter_cases import case

pytestmark = pytest.mark.filterwarnings("ignore")

_TYPE = "sentence_transformers.models."
_MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
_SETTINGS = {"model_type": "SentenceTransformer", "prompts": {"query": "query: "}}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=3))


def list_modules(folder: Path, modules: dict[str, str], prefix: str = _TYPE) -> None:
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": prefix + name}
        for at, (path, name) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", listed)


def add_modules(folder: Path) -> None:
    list_modules(folder, _MODULES)
    write_json(folder / "config_sentence_transformers.json", _SETTINGS)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 77})
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write_json(folder / "2_Dense" / "config.json", {"in_features": 8})
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "2_Dense" / "model.safetensors")
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "2_Dense" / "dense.py").write_text("raise SystemExit\n")


@pytest.fixture(scope="session", name="made")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    case("bert", task="feature-extraction").write(folder)
    add_modules(folder / "base")
    return folder


@pytest.fixture
def inputs(made: Path, tmp_path: Path) -> Path:
    """Return a folder with `base`, an embedding model with modules, and a plain `adapter` for it."""
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def planned(folder: Path) -> Plan:
    base, adapter = open_model(folder / "base"), open_checkpoint(folder / "adapter")
    assert isinstance(adapter, AdapterDir)
    return plan_merge(base, adapter)


def sources(plan: Plan) -> dict[str, str]:
    return {
        file.filename: file.source.relative_to(file.source.parents[file.filename.count("/") + 1]).parts[0]
        for file in plan.side_files
        if file.source is not None
    }


_BASES = [
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
]


def test_the_modules_of_the_base_are_taken_along_byte_for_byte(inputs: Path) -> None:
    plan = planned(inputs)
    execute(plan, inputs / "out")
    assert set(sources(plan)) >= set(_BASES)
    for name in _BASES:
        assert (inputs / "out" / name).read_bytes() == (inputs / "base" / name).read_bytes()
    assert not (inputs / "out" / "2_Dense" / "dense.py").exists()
    said = "\n".join(plan.notes)
    assert "not copied from the base: 2_Dense/dense.py, 2_Dense/pytorch_model.bin" in said
    assert "`3_Normalize`, which has no files" in said
    recorded = {
        file["name"]: file["reason"] for file in json.loads((inputs / "out" / FILE_NAME).read_text())["side_files"]
    }
    assert all(recorded[name] == "copied from the base" for name in _BASES)
    verify(inputs / "out").raise_for_errors()
    pushed = {content.name for content in select(open_model(inputs / "out"))[0]}
    assert pushed >= set(_BASES)


def test_verify_misses_a_module_that_was_lost(inputs: Path) -> None:
    execute(planned(inputs), inputs / "out")
    (inputs / "out" / "1_Pooling" / "config.json").unlink()
    (inputs / "out" / "modules.json").unlink()
    found = verify(inputs / "out").report.findings
    assert {finding.subject for finding in found if finding.code == "LT615"} == {
        "1_Pooling/config.json",
        "modules.json",
    }


def test_the_adapters_own_modules_come_first(inputs: Path) -> None:
    list_modules(inputs / "adapter", {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"})
    write_json(inputs / "adapter" / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    found = sources(planned(inputs))
    assert found["modules.json"] == found["1_Pooling/config.json"] == "adapter"
    assert found["2_Dense/model.safetensors"] == found["sentence_bert_config.json"] == "base"


def test_what_modules_json_names_and_is_nowhere_is_said(inputs: Path) -> None:
    (inputs / "base" / "1_Pooling" / "config.json").unlink()
    assert any("`1_Pooling`, which has no files" in warning for warning in planned(inputs).warnings)


@pytest.mark.parametrize("path", ["../adapter", "/etc", "1_Pooling/x", "..", ".git", 7, "a\x00b"])
def test_modules_json_names_bare_folders_only(path: str, inputs: Path) -> None:
    write_json(inputs / "base" / "modules.json", [{"path": "", "type": "x"}, {"path": path, "type": "y"}])
    plan = planned(inputs)
    assert "modules.json" not in sources(plan)
    assert any("not the bare name" in warning for warning in plan.warnings)
    assert any("1_Pooling/" in note and "modules.json" in note for note in plan.notes)


@pytest.mark.parametrize("content", ["{}", "[1]", "[", "[]", '[{"path": "0_Transformer"}]'])
def test_a_modules_json_that_would_not_load_what_is_merged_is_left_out(content: str, inputs: Path) -> None:
    (inputs / "base" / "modules.json").write_text(content)
    plan = planned(inputs)
    assert not set(_BASES) & set(sources(plan))
    assert any("the modules of sentence-transformers are not copied" in warning for warning in plan.warnings)


def test_a_link_out_of_the_folder_is_refused(inputs: Path) -> None:
    secret = inputs / "secret.json"
    secret.write_text("{}")
    path = inputs / "base" / "1_Pooling" / "config.json"
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CorruptFile, match="link that leads out of its folder"):
        planned(inputs)
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(inputs)
    with pytest.raises(CorruptFile, match="link that leads out of its folder"):
        planned(inputs)


def test_classes_that_are_code_are_named(inputs: Path) -> None:
    list_modules(inputs / "base", _MODULES, prefix="my_module.")
    assert any("my_module.Pooling" in warning for warning in planned(inputs).warnings)


@pytest.mark.parametrize("kind", ["SentenceTransformer", "CrossEncoder"])
def test_a_classifier_has_modules_as_a_cross_encoder_only(kind: str, tmp_path: Path) -> None:
    case("bert", task="seq-cls", exclude_modules=["classifier"]).write(tmp_path)
    list_modules(tmp_path / "base", {"": "Transformer"})
    write_json(tmp_path / "base" / "config_sentence_transformers.json", {"model_type": kind})
    plan = planned(tmp_path)
    assert ("modules.json" in sources(plan)) == (kind == "CrossEncoder")
    assert any("modules.json" in note for note in plan.notes) == (kind != "CrossEncoder")


def test_what_a_loader_could_want_is_copied_or_named(inputs: Path) -> None:
    for name in (
        "modeling_own.py",
        "notes.txt",
        "onnx/model.onnx",
        "additional_chat_templates/tool.jinja",
        "NOTICE",
        "spm.model",
    ):
        (inputs / "base" / name).parent.mkdir(exist_ok=True)
        (inputs / "base" / name).write_text(name)
    write_json(inputs / "base" / "processor_config.json", {"auto_map": {"AutoProcessor": "own.Processor"}})
    plan = planned(inputs)
    assert {"additional_chat_templates/tool.jinja", "NOTICE", "spm.model"} <= sources(plan).keys()
    assert "not copied from the base: notes.txt, onnx/" in plan.notes
    assert "the base's code is neither run nor copied: modeling_own.py" in plan.notes
    assert any("processor_config.json names code" in warning for warning in plan.warnings)

"""`convert --to peft`: names that trainers and wrappers give an adapter's tensors, loaded by PEFT once they are repaired."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lora_tool.checkpoints import open_adapter, open_model
from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.execution.engine import execute
from lora_tool.plans.convert.plan_convert import plan_convert
from tests.judging import codes, judge
from tests.oracle.peft_merge import load_model, save_adapter, save_base
from tests.oracle.tiny import Task

Rename = Callable[[str], str]
WEIGHTS = "adapter_model.safetensors"
IN_MEMORY = ("lora_A.", "lora_B.", "lora_magnitude_vector.")


def named(name: str, adapter: str = "default") -> str:
    """Return a saved name as the module's own state dict has it."""
    if name.endswith("lora_magnitude_vector"):
        return f"{name}.{adapter}.weight"
    if name.endswith(("lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta")):
        return f"{name}.{adapter}"
    for part in IN_MEMORY:
        name = name.replace(f".{part}", f".{part}{adapter}.")
    return name


FORMS: dict[str, Rename] = {
    "as PEFT saves it": lambda name: name,
    "prime-rl": lambda name: name.removeprefix(PREFIX),
    "raw": named,
    "raw of another name": lambda name: named(name, "reward"),
    "torch.compile": lambda name: f"_orig_mod.{named(name)}",
    "torch.compile of each layer": lambda name: name.replace(".layers.0.", ".layers.0._orig_mod."),
    "FSDP1": lambda name: (
        named(name).replace(".layers.0.", "._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.")
    ).replace("default.weight", "default._fsdp_wrapped_module.weight"),
    "checkpointing": lambda name: name.replace(".mlp.", ".mlp._checkpoint_wrapped_module."),
    "DDP": lambda name: f"module.{name}",
    "twice": lambda name: PREFIX + name,
    "in a value model": lambda name: f"pretrained_model.{name}",
}
"""What needs no base to be read."""
WITH_BASE: dict[str, Rename] = {
    "LoraModel": lambda name: name.replace(PREFIX, "model."),
    "half of the prefix": lambda name: name.replace(PREFIX, "base_model."),
    "of the base model alone": lambda name: name.replace(f"{PREFIX}model.", PREFIX),
    "prefix-less, of the base model alone": lambda name: name.replace(f"{PREFIX}model.", "").removeprefix(PREFIX),
}
"""What only the modules of the base tell."""
LORAS: dict[str, tuple[Task, dict[str, Any]]] = {
    "causal": ("causal-lm", {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}}),
    "head under LoRA": ("causal-lm", {"target_modules": ["v_proj", "lm_head"]}),
    "reward": ("seq-cls", {"target_modules": ["q_proj", "down_proj"]}),
    "dora": (
        "seq-cls",
        {"target_modules": ["q_proj", "o_proj"], "use_dora": True, "modules_to_save": ["score", "norm"]},
    ),
    "embedding": ("causal-lm", {"target_modules": ["embed_tokens", "v_proj"]}),
    "tokens": ("causal-lm", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 4]}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a maker of base and adapter of one kind, each made once."""
    root = tmp_path_factory.mktemp("made")

    def make(kind: str) -> tuple[Path, Path]:
        task, lora = LORAS[kind]
        base, adapter = root / task, root / kind
        if not base.exists():
            save_base(base, "llama", task, torch.float32)
        if not adapter.exists():
            save_adapter(adapter, base, task, {"r": 4, **lora})
        return base, adapter

    return make


def renamed(adapter: Path, folder: Path, form: Rename) -> Path:
    """Return a copy of the adapter whose tensors have the names of the form."""
    shutil.copytree(adapter, folder)
    tensors = load_file(adapter / WEIGHTS)
    save_file({form(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


def held(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return all that a model with an adapter holds."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_loads(base: Path, folder: Path, task: Task, truth: dict[str, torch.Tensor]) -> None:
    """Return if PEFT loads the adapter, under any name, with nothing missing, nothing left over and the same bits."""
    model = PeftModel.from_pretrained(load_model(base, task), folder)
    again = model.load_adapter(folder, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    found = {name: tensor for name, tensor in model.state_dict().items() if ".again" not in name}
    assert found.keys() == truth.keys()
    assert [name for name, tensor in truth.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize("kind", LORAS)
def test_peft_loads_every_form(kind: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    base, adapter = made(kind)
    task = LORAS[kind][0]
    truth = held(PeftModel.from_pretrained(load_model(base, task), adapter))
    good = load_file(adapter / WEIGHTS)
    opened = open_model(base)
    for number, (form, rename) in enumerate({**FORMS, **WITH_BASE}.items()):
        folder = renamed(adapter, tmp_path / f"in-{number}", rename)
        out = tmp_path / f"out-{number}"
        bases = (opened,) if form in WITH_BASE else (None, opened)
        for known in bases:
            plan = plan_convert(open_adapter(folder), to="peft", base=known)
            assert {step.out.name: step.op.source.name for step in plan.steps} == {n: rename(n) for n in good}, form
        execute(plan, out)
        written = load_file(out / WEIGHTS)
        assert written.keys() == good.keys(), form
        assert all(torch.equal(written[name], good[name]) for name in good), form
        assert json.loads((out / "adapter_config.json").read_text()) == json.loads(
            (folder / "adapter_config.json").read_text()
        )
    assert_loads(base, out, task, truth)


def test_validate_knows_each_form_and_names_the_command(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, adapter = made("causal")
    for number, (form, rename) in enumerate({**FORMS, **WITH_BASE}.items()):
        folder = renamed(adapter, tmp_path / f"{number}", rename)
        found = [finding for finding in judge(folder, base=base).findings if finding.code == "LT211"]
        assert bool(found) is (form != "as PEFT saves it"), form
        assert all(finding.hint == f"lora-tool convert {folder} --to peft" for finding in found), form


@pytest.mark.parametrize("form", WITH_BASE)
def test_two_readings_without_a_base(form: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, adapter = made("causal")
    folder = renamed(adapter, tmp_path / "in", WITH_BASE[form])
    if form in (
        "of the base model alone",
        "half of the prefix",
    ):  # PEFT's own form: another class may have such modules
        plan = plan_convert(open_adapter(folder), to="peft")
        assert plan.notes[1].startswith("not compared with the modules of its base")
        return
    with pytest.raises(UnsupportedAdapter) as refused:
        plan_convert(open_adapter(folder), to="peft")
    assert refused.value.hint == (
        f"give the model that it was trained on: lora-tool convert {folder} --to peft --base MODEL"
    )


def test_a_name_that_fits_two_readings_of_the_base(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    base, adapter = made("causal")
    folder = renamed(adapter, tmp_path / "in", FORMS["prime-rl"])
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": None, "auto_mapping": None}))
    with pytest.raises(UnsupportedAdapter, match="is ambiguous: it can mean the base model's `model") as refused:
        plan_convert(open_adapter(folder), to="peft", base=open_model(base))
    assert '"task_type": "CAUSAL_LM"' in str(refused.value.hint)


def test_what_would_be_one_tensor(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, adapter = made("causal")
    tensors = load_file(adapter / WEIGHTS)
    folder = Path(shutil.copytree(adapter, tmp_path / "in"))
    save_file({**tensors, **{named(name): tensor.clone() for name, tensor in tensors.items()}}, folder / WEIGHTS)
    plan = plan_convert(open_adapter(folder), to="peft")
    assert plan.counts() == {"copied": len(tensors), "dropped": len(tensors)}
    save_file({**tensors, **{named(name): tensor + 1 for name, tensor in tensors.items()}}, folder / WEIGHTS)
    with pytest.raises(UnsupportedAdapter, match="would be one tensor of the adapter, but have different values"):
        plan_convert(open_adapter(folder), to="peft")
    both = {named(name, who): tensor.clone() for who in ("one", "two") for name, tensor in tensors.items()}
    save_file(both, folder / WEIGHTS)
    with pytest.raises(UnsupportedAdapter, match=r"holds 2 adapters \(one, two\)"):
        plan_convert(open_adapter(folder), to="peft")


def test_what_the_rules_call_an_error_is_refused_by_its_code(
    made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    base, adapter = made("causal")
    folder = renamed(adapter, tmp_path / "in", lambda name: name.replace(".mlp.", ".mlpp.").removeprefix(PREFIX))
    with pytest.raises(FindingsFound, match="LT501"):
        plan_convert(open_adapter(folder), to="peft", base=open_model(base))
    plan_convert(open_adapter(folder), to="peft", base=open_model(base), ignore=["LT501", "LT505"])


def test_wrapped_paths_in_the_config(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """PEFT on a compiled model lists the modules by the paths that they have there."""
    base, adapter = made("causal")
    folder = renamed(adapter, tmp_path / "in", FORMS["torch.compile of each layer"])
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {
        "target_modules": ["layers.0._orig_mod.self_attn.q_proj", "layers.1.self_attn.q_proj", "_orig_mod.mlp.up_proj"],
        "rank_pattern": {"_orig_mod.self_attn.q_proj": 2, "self_attn.q_proj": 2},
    }
    config["target_modules"].append("layers.1.mlp.up_proj")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    out = execute(plan_convert(open_adapter(folder), to="peft"), tmp_path / "out")
    written = json.loads((out / "adapter_config.json").read_text())
    assert "_orig_mod" not in json.dumps(written)
    assert {name: value for name, value in written.items() if value != config[name]}.keys() == {
        "target_modules",
        "rank_pattern",
    }
    truth = held(PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter))
    assert_loads(base, out, "causal-lm", truth)
    assert "LT211" not in codes(judge(out, base=base))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_experts_one_by_one_and_fused(model_type: str, tmp_path: Path) -> None:
    """prime-rl trains single experts; PEFT fuses their factors when it loads them, under their right names."""
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32)
    model = load_model(base, "causal-lm")
    fused = LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], task_type="CAUSAL_LM"
    )
    trained = get_peft_model(load_model(base, "causal-lm"), fused)
    generator = torch.Generator().manual_seed(3)
    for parameter in (each for each in trained.parameters() if each.requires_grad):
        torch.nn.init.normal_(parameter, generator=generator)
    trained.save_pretrained(str(tmp_path / "fused"))
    inner, block = ("w1", "w3", "w2"), "block_sparse_moe"
    if model_type == "qwen3_moe":
        inner, block = ("gate_proj", "up_proj", "down_proj"), "mlp"
    experts, hidden = model.config.num_local_experts, model.config.hidden_size
    width = model.state_dict()["model.layers.0.mlp.experts.down_proj"].shape[2]
    single = {
        f"model.layers.{layer}.{block}.experts.{expert}.{name}.{part}.weight": torch.randn(
            (2, columns) if part == "lora_A" else (rows, 2), generator=generator
        )
        for layer in range(model.config.num_hidden_layers)
        for expert in range(experts)
        for name, rows, columns in zip(inner, (width, width, hidden), (hidden, hidden, width), strict=True)
        for part in ("lora_A", "lora_B")
    }
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8, "target_modules": [*inner]}
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "adapter_config.json").write_text(json.dumps(config))
    save_file({PREFIX + name: tensor for name, tensor in single.items()}, tmp_path / "single" / WEIGHTS)
    for kind in ("fused", "single"):
        truth = held(PeftModel.from_pretrained(load_model(base, "causal-lm"), tmp_path / kind))
        for number, form in enumerate(("prime-rl", "torch.compile", "FSDP1")):
            folder = renamed(tmp_path / kind, tmp_path / f"{kind}-{number}", FORMS[form])
            out = execute(plan_convert(open_adapter(folder), to="peft"), tmp_path / f"{kind}-{number}-out")
        assert_loads(base, out, "causal-lm", truth)

"""Megatron's LoRA on other models: gated attention, experts with one LoRA, and the folders that NeMo-RL nests them in.

The pieces are written by torch's own saver under the names and shapes that mcore 0.16 gives Megatron-Bridge's modules.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from lora_tool import merge
from lora_tool.checkpoints import open_sharded
from lora_tool.core.errors import NotACheckpoint, UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.formats.files import read_object
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.verification.validating import validate
from lora_tool_megatron.model import Geometry, LayerNames, MegatronModel
from lora_tool_megatron.names import places
from tests.cli.calling import FIXTURES
from tests.oracle.peft_merge import load_model, save_base

RANK = 2
TOKENS = torch.tensor([[1, 5, 9, 30, 2]])
PREFIX = "base_model.model.model.layers"
GENERATOR = torch.Generator().manual_seed(3)


def factors(layer: int, module: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    """Return A and B of one of Megatron's modules, by their names in its checkpoint."""
    name = f"decoder.layers.{layer}.{module}.adapter"
    return {
        f"{name}.linear_in.weight": torch.randn(RANK, inputs, generator=GENERATOR),
        f"{name}.linear_out.weight": torch.randn(outputs, RANK, generator=GENERATOR),
    }


def saved(iteration: Path, tensors: dict[str, torch.Tensor], **model: Any) -> Path:
    """Write an iteration, and what Megatron-Bridge writes beside it; return its folder."""
    iteration.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is disabled
        save(tensors, checkpoint_id=iteration, no_dist=True)
    provider = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **model}
    lora = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": RANK, "alpha": 2 * RANK}
    (iteration / "run_config.yaml").write_text(json.dumps({"model": provider, "peft": lora}))  # JSON is YAML
    return iteration


def assert_peft_and_merge_agree(base: Path, adapter: Path, out: Path) -> None:
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter).eval()
    again = model.load_adapter(adapter, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    merge(adapter, base=base, out=out)
    with torch.no_grad():
        expected = model(TOKENS).logits
        with model.disable_adapter():
            assert (expected - model(TOKENS).logits).abs().max() > 1e-2
        assert torch.allclose(load_model(out, "causal-lm").eval()(TOKENS).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_gated_attention_in_the_folders_of_nemo_rl(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_next", "causal-lm", torch.float32)
    heads, groups, size, hidden = 4, 2, 8, 32
    tensors = factors(1, "self_attention.linear_qkv", (2 * heads + 2 * groups) * size, hidden)
    tensors |= factors(1, "self_attention.linear_proj", hidden, heads * size)
    step = tmp_path / "results" / "step_30"
    geometry = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": size}
    inner = {"transformer": {**geometry, "attention_output_gate": True}}
    metadata = {"extra_checkpoint_metadata": {"hf_model_id": str(base)}}
    iteration = saved(step / "policy" / "weights" / "iter_0000000", tensors, **inner, **metadata)
    (step / "config.yaml").write_text(json.dumps({"policy": {"model_name": str(base)}}))
    for place in (iteration, iteration.parent, step, step.parent):
        assert validate(place).at_least(Severity.WARNING) == ()
        plan = plan_consolidate(place)
        assert plan.warnings == ()
    out = execute(plan, tmp_path / "out")
    fused = tensors["decoder.layers.1.self_attention.linear_qkv.adapter.linear_out.weight"]
    grouped = fused.view(groups, 2 * heads // groups + 2, size, RANK)
    each = heads // groups
    queries, gates = (part.reshape(heads, size, RANK) for part in (grouped[:, :each], grouped[:, each : 2 * each]))
    found = load_file(out / "adapter_model.safetensors")
    # transformers' Qwen3-Next views q_proj as heads of twice the size: the query, then its gate
    assert torch.equal(
        found[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"], torch.cat([queries, gates], 1).flatten(0, 1)
    )
    assert torch.equal(found[f"{PREFIX}.1.self_attn.k_proj.lora_B.weight"], grouped[:, -2].flatten(0, 1))
    assert torch.equal(found[f"{PREFIX}.1.self_attn.v_proj.lora_B.weight"], grouped[:, -1].flatten(0, 1))
    config = read_object(out / "adapter_config.json")
    assert (config["base_model_name_or_path"], config["use_rslora"]) == (str(base), False)
    assert_peft_and_merge_agree(base, out, tmp_path / "merged")


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_one_lora_for_all_experts(tmp_path: Path) -> None:
    """As Megatron-Bridge saved it until it gave it an axis of experts."""
    base = save_base(tmp_path / "base", "mixtral", "causal-lm", torch.float32)
    tensors = {
        name: tensor
        for layer in range(2)
        for module, outputs, inputs in (("linear_fc1", 96, 32), ("linear_fc2", 32, 48))
        for name, tensor in factors(layer, f"mlp.experts.experts.{module}", outputs, inputs).items()
    }
    run = tmp_path / "run"
    saved(run / "iter_0000003", tensors)
    shutil.copyfile(base / "config.json", run / "config.json")
    out = execute(plan_consolidate(run), tmp_path / "out")
    found = load_file(out / "adapter_model.safetensors")
    assert len(found) == 2 * 4 * 3 * 2
    fused = tensors["decoder.layers.1.mlp.experts.experts.linear_fc1.adapter.linear_out.weight"]
    for expert in range(4):
        path = f"{PREFIX}.1.block_sparse_moe.experts.{expert}"
        assert torch.equal(found[f"{path}.w1.lora_B.weight"], fused[:48])
        assert torch.equal(found[f"{path}.w3.lora_B.weight"], fused[48:])
    assert_peft_and_merge_agree(base, out, tmp_path / "merged")


def test_which_iteration(tmp_path: Path) -> None:
    """The one that a file points at; Megatron-Bridge points by the step in a torch file."""
    run = tmp_path / "run"
    for number in (7, 14, 21):
        shutil.copytree(FIXTURES / "megatron-lora" / "iter_0000007", run / f"iter_{number:07d}")
    assert open_sharded(run).latest is None
    with pytest.raises(NotACheckpoint, match="has several iterations and no file `latest_checkpointed_iteration.txt`"):
        plan_consolidate(run)
    assert plan_consolidate(run, tag="iter_0000007").notes[0].count("iter_0000007") == 1
    (run / "latest_checkpointed_iteration.txt").write_text("14\n")
    assert "iter_0000014" in plan_consolidate(run).notes[0]
    assert [finding.code for finding in validate(run).at_least(Severity.WARNING)] == ["LT409"]
    torch.save({"step": torch.tensor(21)}, run / "latest_train_state.pt")
    assert "iter_0000021" in plan_consolidate(run).notes[0]
    assert validate(run).at_least(Severity.WARNING) == ()
    (run / "latest_train_state.pt").write_bytes(b"PK")
    assert open_sharded(run).latest == "iter_0000014"
    (run / "latest_checkpointed_iteration.txt").write_text("28")
    with pytest.raises(NotACheckpoint, match="names iter_0000028, which does not exist"):
        plan_consolidate(run)


QWEN3 = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 16}


@pytest.mark.parametrize(
    ("config", "module", "message"),
    [
        ({**QWEN3, "num_key_value_heads": 4}, "self_attention.linear_qkv", "the config.json of the model says"),
        (
            {**QWEN3, "model_type": "glm4"},
            "self_attention.linear_qkv",
            "the model is a glm4, for which lora-tool does not know",
        ),
        ({**QWEN3, "model_type": "qwen3_next"}, "self_attention.linear_qkv", "`model.attention_output_gate` is false"),
        ({**QWEN3, "model_type": "qwen3_moe"}, "mlp.linear_fc1", "transformers' model has no such modules"),
        (QWEN3, "mlp.experts.experts.0.linear_fc2", "transformers' model has no such modules"),
        ({**QWEN3, "num_attention_heads": 1 << 30}, "self_attention.linear_qkv", "do not describe attention"),
        (
            {**QWEN3, "model_type": "qwen2_moe"},
            "mlp.experts.experts.0.linear_fc2",
            "PEFT does not load LoRA on these experts",
        ),
    ],
)
def test_what_the_model_is_not_known_for(config: dict[str, Any], module: str, message: str, tmp_path: Path) -> None:
    geometry = {"num_query_groups": 2, "kv_channels": 4, "attention_output_gate": False}
    saved(tmp_path / "iter_0000001", factors(0, module, 32, 16), **geometry)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match=message):
        plan_consolidate(tmp_path / "iter_0000001")


def test_what_was_trained_whole_is_never_left_behind(tmp_path: Path) -> None:
    tensors = factors(0, "self_attention.linear_qkv", 32, 16)
    geometry = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4}
    head = {"output_layer.weight": torch.ones(1, 16)}
    saved(tmp_path / "iter_0000001", {**tensors, **head}, **geometry)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(UnsupportedCheckpoint, match="`output_layer.weight` was trained whole beside the LoRA"):
        plan_consolidate(tmp_path / "iter_0000001")
    base = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(32, 16)}
    saved(tmp_path / "iter_0000002", {**tensors, **head, **base}, **geometry)
    plan = plan_consolidate(tmp_path / "iter_0000002")
    assert plan.counts() == {"copied": 6}
    assert "output_layer.weight" in plan.notes[-1]


def test_a_whole_model_of_megatron_is_no_model_of_transformers(tmp_path: Path) -> None:
    weights = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(32, 16)}
    saved(tmp_path / "iter_0000001", weights)
    with pytest.raises(UnsupportedCheckpoint, match="is a model whose modules another program fused"):
        plan_consolidate(tmp_path)
    assert plan_consolidate(tmp_path, what="state").counts() == {"copied": 1}


def test_numbers_that_no_model_has() -> None:
    """They are told before anything of their size is made."""
    geometry = Geometry(heads=4, groups=2, head_dim=4)
    many = MegatronModel(geometry=geometry, names=LayerNames(experts="mlp.experts"), layers=1 << 19, experts=1 << 19)
    assert next(many.linear_modules(), None) is None
    name = "decoder.layers.{}mlp.experts.experts.linear_fc2.adapter.linear_in.weight"
    some = MegatronModel(geometry=geometry, names=many.names, layers=2, experts=4)
    for model, shape, message in (
        (some, (1 << 30, 4, 2, 8), "more matrices than any model has"),
        (many, (1 << 10, 2, 8), "more matrices than any model has"),
        (some, (2, 3, 2, 8), "is for 3 experts, but the model has 4"),
    ):
        with pytest.raises(UnsupportedCheckpoint, match=message):
            places({name.format(""): shape}, model)
    assert len(places({name.format("0."): (4, 2, 8)}, some)) == 4
    large = MegatronModel(geometry=geometry, names=many.names, layers=94, experts=512)
    assert len(places({name.format(""): (94, 512, 2, 8)}, large)) == 94 * 512

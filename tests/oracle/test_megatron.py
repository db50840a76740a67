"""The LoRA of Megatron-Bridge, saved by mcore's own `dist_checkpointing`: the bits that transformers' modules get."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3MoeForCausalLM

from lora_tool import merge
from lora_tool.core.errors import FindingsFound, UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.formats.dcp import read_dcp
from lora_tool.formats.state_dicts import module_names
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.verification.validating import validate
from lora_tool.workflows.inventory import inventory
from lora_tool_megatron.model import Geometry, LayerNames, MegatronModel
from lora_tool_megatron.names import is_megatron, places
from tests.cli.calling import FIXTURES

MEGATRON = FIXTURES / "megatron-lora"
"""Two ranks of tensor parallelism, three layers in one tensor, four heads in two groups (`fixtures/make_megatron.py`)."""
MODEL = MegatronModel(geometry=Geometry(heads=4, groups=2, head_dim=4), names=LayerNames(), layers=0, experts=0)
LAYER = "decoder.layers.0"
CONFIGS = {
    "megatron-lora": "megatron-swift/base/config.json",
    "megatron-moe": "megatron-moe/config.json",
    "megatron-swift": "megatron-swift/base/config.json",
}
MODELS = {"llama": LlamaForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM}


def torch_equal(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> bool:
    """Return whether both have the same tensors, bit for bit."""
    return found.keys() == truth.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in truth.items()
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An iteration to break."""
    return Path(shutil.copytree(MEGATRON / "iter_0000007", tmp_path / "run" / "iter_0000007"))


def test_every_bit_is_where_transformers_has_it(run: Path, tmp_path: Path) -> None:
    assert validate(run).at_least(Severity.WARNING) == ()
    plan = plan_consolidate(run)
    assert plan.notes[0].startswith("adapter from Megatron checkpoint")
    out = execute(plan, tmp_path / "out")
    found, truth = load_file(out / "adapter_model.safetensors"), load_file(MEGATRON / "truth.safetensors")
    assert torch_equal(found, truth)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    told = json.loads((out / "lora_tool.json").read_text())
    assert told["adapter_config"]["lora_alpha"] == str(run / "run_config.yaml")


@pytest.mark.parametrize(
    ("found", "instead", "message"),
    [
        (
            "llama_provider.Llama32ModelProvider1B",
            "nemotron.NemotronModelProvider",
            "does not know transformers' module names",
        ),
        ("gated_linear_unit: true", "gated_linear_unit: false", "`model.gated_linear_unit` is false"),
        ("kv_channels: 4", "attention_output_gate: true", "`model.attention_output_gate` is true"),
        ("num_query_groups: 2", "num_query_groups: 4", "has 32 rows, but 4 heads in 4 groups need 48"),
        ("num_attention_heads: 4", "num_attention_heads: 3", "do not describe attention"),
        ("model:", "other:", "has no section `model`"),
    ],
)
def test_what_is_not_known_is_refused_by_name(run: Path, found: str, instead: str, message: str) -> None:
    config = run / "run_config.yaml"
    text = config.read_text()
    assert found in text
    config.write_text(text.replace(found, instead))
    with pytest.raises(UnsupportedCheckpoint, match=message):
        plan_consolidate(run)


def test_without_the_config_of_the_run(run: Path) -> None:
    (run / "run_config.yaml").unlink()
    with pytest.raises(
        UnsupportedCheckpoint, match="without run_config.yaml, which says how rows of its modules are fused"
    ) as refused:
        plan_consolidate(run)
    assert refused.value.hint == "put the run_config.yaml of the run beside its files, or the config.json of its model"


def test_a_flipped_bit_in_factors_that_several_modules_share(run: Path) -> None:
    path, data = run / "__0_0.distcp", bytearray((run / "__0_0.distcp").read_bytes())
    (piece, *_) = [
        each.record
        for name, pieces in read_dcp(run).pieces.items()
        if name.endswith("linear_qkv.adapter.linear_in.weight")
        for each in pieces
        if each.record.path == path
    ]
    data[piece.offset] ^= 1
    path.write_bytes(data)
    assert [finding.code for finding in validate(run).at_least(Severity.WARNING)] == ["LT411"]


@pytest.mark.parametrize("module", ["model/dist_ckpt", "dist_ckpt"])
def test_verls_engine_for_megatron(module: str, tmp_path: Path) -> None:
    """The folders of its newer and its older layout: read from the run, a step, a role and the pieces' own folder."""
    run = tmp_path / "run"
    for step in (3, 10):
        pieces = run / f"global_step_{step}" / "actor" / module
        shutil.copytree(MEGATRON / "iter_0000007", pieces)
        (pieces / "run_config.yaml").unlink()
        (pieces.parent / "huggingface").mkdir()
        shutil.copy(FIXTURES / CONFIGS["megatron-lora"], pieces.parent / "huggingface")
        told = {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
        (run / f"global_step_{step}" / "actor" / "lora_train_meta.json").write_text(json.dumps(told))
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    actor = run / "global_step_3" / "actor"
    truth = load_file(MEGATRON / "truth.safetensors")
    for number, place in enumerate((run, actor.parent, actor, actor / module)):
        out = execute(plan_consolidate(place), tmp_path / str(number))
        assert torch_equal(load_file(out / "adapter_model.safetensors"), truth)
    newer = plan_consolidate(run, tag="global_step_10")
    assert f"{run / 'global_step_10' / 'actor' / module}," in newer.notes[0]
    assert [finding.code for finding in validate(run).at_least(Severity.WARNING)] == ["LT409"]
    (found,) = inventory(run)
    assert [(item.row.step, item.row.verdict) for item in found.checkpoints] == [(3, "good"), (10, "good")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_verls_lora_in_a_file_for_each_rank_is_refused(tmp_path: Path) -> None:
    """As its engine for Megatron wrote it at first, beside the pieces of the optimizer alone."""
    folder = tmp_path / "actor" / "adapter_checkpoint"
    folder.mkdir(parents=True)
    held = {f"{LAYER}.mlp.linear_fc2.adapter.linear_in.weight": torch.ones(3, 12)}
    torch.save({"adapter_state_dict": held}, folder / "mp_rank_00_adapter.pt")
    save({"optimizer": {"state": {"exp_avg": torch.ones(4)}}}, checkpoint_id=folder.parent / "dist_ckpt", no_dist=True)
    for place in (folder, folder.parent):
        with pytest.raises(
            UnsupportedCheckpoint, match=r"mp_rank_00_adapter\.pt is the LoRA of one rank of verl's engine"
        ):
            plan_consolidate(place)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("before", ["", "chained_0."])
def test_the_pieces_of_an_optimizer_are_no_model(tmp_path: Path, before: str) -> None:
    """As SkyRL saves LoRA under Megatron: beside them lie files of each rank, which lora-tool names."""
    bucket = (
        f"{before}optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0"
    )
    states = {f"{bucket}.{name}": torch.ones(4) for name in ("param", "exp_avg", "exp_avg_sq")}
    save(states, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    with pytest.raises(FindingsFound, match=rf"holds no weights, but .*: {before}optimizer"):
        plan_consolidate(tmp_path)
    torch.save({}, tmp_path / "adapter_tp0_pp0_cp0_dp0_ep0_etp0.pt")
    with pytest.raises(UnsupportedCheckpoint, match=r"is the LoRA of one rank of SkyRL's engine"):
        plan_consolidate(tmp_path)


def test_layers_one_by_one_and_projections_with_factors_of_their_own() -> None:
    shapes = {
        f"{LAYER}.self_attention.linear_qkv.adapter.linear_in.weight": (3, 16),
        f"{LAYER}.self_attention.linear_qkv.adapter.linear_out.weight": (32, 3),
        f"{LAYER}.mlp.linear_fc1.adapter.adapter_gate.linear_in.weight": (3, 16),
        f"{LAYER}.mlp.linear_fc1.adapter.adapter_gate.linear_out.weight": (24, 3),
    }
    found = places(shapes, MODEL)
    prefix = "base_model.model.model.layers.0"
    assert {name.removeprefix(f"{prefix}."): place.rows for name, place in found.items()} == {
        "self_attn.q_proj.lora_A.weight": ((0, 3),),
        "self_attn.k_proj.lora_A.weight": ((0, 3),),
        "self_attn.v_proj.lora_A.weight": ((0, 3),),
        "self_attn.q_proj.lora_B.weight": ((0, 8), (16, 8)),
        "self_attn.k_proj.lora_B.weight": ((8, 4), (24, 4)),
        "self_attn.v_proj.lora_B.weight": ((12, 4), (28, 4)),
        "mlp.gate_proj.lora_A.weight": ((0, 3),),
        "mlp.gate_proj.lora_B.weight": ((0, 24),),
    }
    assert all(place.first == 0 for place in found.values())


def test_the_optimizer_of_an_adapter_is_no_adapter() -> None:
    name = f"{LAYER}.mlp.linear_fc2.adapter.linear_in.weight"
    states = [f"{before}optimizer.state.exp_avg.{name}" for before in ("", "chained_0.")]
    assert module_names(Path("run"), {each: (each,) for each in (name, *states)}) == {name: name}
    assert is_megatron({name: (3, 24)})
    assert not is_megatron({"model.layers.0.adapter.down.weight": (3, 24)})


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        ("self_attention.linear_proj.adapter", (16,), "a module that the layers of text models do not have"),
        (
            "mixer.in_proj.adapter.linear_out",
            (10, 3),
            "LoRA on Mamba's mixer, whose in_proj is five projections in one",
        ),
        ("mlp.router.adapter.linear_out", (4, 3), "LoRA on a router"),
        ("self_attention.in_proj.adapter.linear_out", (4, 3), "LoRA on linear attention"),
        ("mlp.experts.linear_fc1.adapter.linear_in", (3, 16), "no file says how many experts there are"),
        ("self_attention.linear_qkv.adapter.adapter_gate.linear_in", (3, 16), "has no part `gate`"),
        ("mlp.linear_fc1.adapter.linear_out", (25, 3), "not those of a gate and an up projection"),
        ("mlp.linear_fc2.adapter.linear_in", (3,), "expected a matrix for each layer"),
    ],
)
def test_lora_on_other_modules(module: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        places({f"{LAYER}.{module}.weight": shape}, MODEL)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_and_merges_what_each_trainer_left(name: str, tmp_path: Path) -> None:
    """With nothing missing and nothing left over, and to the logits of the merged model."""
    run = Path(shutil.copytree(FIXTURES / name, tmp_path / "run"))
    config = json.loads((FIXTURES / CONFIGS[name]).read_text())
    torch.manual_seed(2)
    model_class = MODELS[config["model_type"]]
    base = model_class(model_class.config_class(**config))
    base.save_pretrained(tmp_path / "run" / "base")
    (run / "base" / "config.json").replace(run / "config.json")
    base.save_pretrained(run / "base")
    out = execute(plan_consolidate(run), tmp_path / "out")
    found, truth = load_file(out / "adapter_model.safetensors"), load_file(run / "truth.safetensors")
    assert torch_equal(found, truth)
    model = PeftModel.from_pretrained(base, out).eval()
    again = model.load_adapter(out, "again")
    assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
    tokens = torch.tensor([[1, 5, 9, 30, 2]])
    with torch.no_grad():
        expected = model(tokens).logits
        plain = base_logits(model, tokens)
    assert (expected - plain).abs().max() > 1e-2
    merge(out, base=run / "base", out=tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, expected, rtol=0, atol=2e-4)


def base_logits(model: PeftModel, tokens: torch.Tensor) -> torch.Tensor:
    with model.disable_adapter():
        logits: torch.Tensor = model(tokens).logits
    return logits

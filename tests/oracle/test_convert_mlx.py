"""Adapters between PEFT and MLX-LM: values keep their bits there and back, and MLX-LM itself loads and writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save, save_file

from lora_tool import validate, verify
from lora_tool.checkpoints import open_checkpoint
from lora_tool.core.errors import UnsupportedCheckpoint
from lora_tool.core.keys import PREFIX
from lora_tool.formats.files import read_json
from tests.cli.calling import Caller
from tests.oracle.peft_merge import different, load_model, saved_tensors
from tests.oracle.test_combine import EMBEDDINGS, EXACT, QV, adapters_of, deltas, farthest
from tests.oracle.test_convert_experts import FUSED
from tests.oracle.test_prepare import in_mlx
from tests.oracle.test_text_on_multimodal import save_adapter, save_whole
from tests.oracle.tiny import AUTO

RSLORA = QV | {"use_rslora": True, "r": 4}
SOME_LAYERS = QV | {"layers_to_transform": [1]}
TOKENS = [5, 17, 3, 42, 8]


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [
        (QV, torch.bfloat16),
        (RSLORA, torch.float32),
        (SOME_LAYERS, torch.float32),
        (EMBEDDINGS, torch.bfloat16),
        (EMBEDDINGS, torch.float32),
    ],
)
def test_values_keep_their_bits_there_and_back(
    lora: dict[str, Any], dtype: torch.dtype, call: Caller, tmp_path: Path
) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", lora, dtype=dtype)
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert call("convert", adapter, "--to", "mlx", "-o", theirs).code == 0
    assert call("convert", theirs, "--to", "peft", "--base", base, "-o", back).code == 0
    held = {name: tensor for name, tensor in saved_tensors(adapter).items() if ".base_layer." not in name}
    assert different(saved_tensors(back), held) == []
    assert farthest(deltas(base, back), deltas(base, adapter)) <= 1e-15
    assert read_json(back / "adapter_config.json").get("layers_to_transform") == lora.get("layers_to_transform")
    assert not validate(back, base=base).findings
    assert not verify(theirs).report.findings
    table = load_file(theirs / "adapters.safetensors")
    table[next(name for name in table if name.endswith("lora_b"))][0] *= 1.5
    save_file(table, theirs / "adapters.safetensors")
    (finding,) = verify(theirs).report.findings
    assert finding.code == "LT626"


def test_the_text_of_a_multimodal_model_comes_back_where_peft_finds_it(call: Caller, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", "qwen2_vl")
    adapter = save_adapter(AUTO["image-text-to-text"].from_pretrained(base), tmp_path / "adapter", **QV)
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert call("convert", adapter, "--to", "mlx", "--base", base, "-o", theirs).code == 0
    assert call("convert", theirs, "--to", "peft", "--base", base, "-o", back).code == 0
    assert different(saved_tensors(back), saved_tensors(adapter)) == []


def test_factors_that_a_torch_file_holds_transposed(call: Caller, tmp_path: Path) -> None:
    """As those are that an optimizer with column-major weights leaves: some of MLX-LM's rows lie as they are meant."""
    _, (adapter,) = adapters_of(tmp_path, "llama", QV)
    held = saved_tensors(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({name: tensor.T.contiguous().T for name, tensor in held.items()}, adapter / "adapter_model.bin")
    assert call("convert", adapter, "--to", "mlx", "-o", tmp_path / "theirs").code == 0
    table = load_file(tmp_path / "theirs" / "adapters.safetensors")
    wanted = {
        name.removeprefix(PREFIX)
        .removesuffix(".weight")
        .replace(".lora_A", ".lora_a")
        .replace(".lora_B", ".lora_b"): each
        for name, each in held.items()
    }
    assert different(table, {name: tensor.T for name, tensor in wanted.items()}) == []
    assert not verify(tmp_path / "theirs").report.findings


def test_several_scalings_need_other_values(call: Caller, tmp_path: Path) -> None:
    _, (adapter,) = adapters_of(tmp_path, "llama", QV | {"alpha_pattern": {"v_proj": 3}})
    called = call("convert", adapter, "--to", "mlx", "-o", tmp_path / "out")
    assert called.code == 3
    assert "prepare" in called.err
    assert "--for mlx" in called.err


def written(folder: Path, table: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter as MLX-LM does: its trainer saves every argument of the run."""
    folder.mkdir()
    data = save(table)
    size = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": None} | json.loads(data[8 : 8 + size])).encode()
    data = len(header).to_bytes(8, "little") + header + data[8 + size :]
    for name in ("adapters.safetensors", "0000100_adapters.safetensors"):
        (folder / name).write_bytes(data)
    run = {"fine_tune_type": "lora", "model": "mlx-community/tiny", "num_layers": 16, "iters": 100, "seed": 0}
    run |= {"lora_parameters": {"rank": 3, "dropout": 0.0, "scale": 20.0}}
    (folder / "adapter_config.json").write_text(json.dumps(run | config))
    return folder


def factors(module: str, inner: int = 64, out: int = 64, rank: int = 3) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_a": torch.randn(inner, rank), f"{module}.lora_b": torch.randn(rank, out)}


def test_what_is_known_only_with_the_base_is_prepared(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", QV | {"trainable_token_indices": {"embed_tokens": [3, 5]}})
    called = call("convert", adapter, "--to", "mlx", "--base", base, "-o", tmp_path / "out")
    assert called.code == 3
    assert f"lora-tool prepare {adapter} --for mlx --base BASE" in called.err


def test_what_mlx_lm_trained_is_pefts_delta(call: Caller, tmp_path: Path) -> None:
    base, _ = adapters_of(tmp_path, "llama", QV)
    hidden = load_model(base, "causal-lm").config.hidden_size
    table = factors("model.layers.1.self_attn.q_proj", hidden, hidden)
    theirs = written(tmp_path / "theirs", table)
    with pytest.raises(UnsupportedCheckpoint, match="MLX-LM") as refused:
        open_checkpoint(theirs)
    assert "lora-tool convert" in str(refused.value.hint)
    called = call("convert", theirs, "--to", "peft", "--base", base)
    assert called.code == 0
    found = deltas(base, tmp_path / "theirs-peft")
    expected = {f"{PREFIX}{name}": delta.T for name, delta in in_mlx(theirs).items()}
    assert farthest({name: found[name] for name in expected}, expected) <= EXACT
    assert all(not delta.any() for name, delta in found.items() if name not in expected)


@pytest.mark.parametrize(
    ("table", "config", "said"),
    [
        (factors("model.layers.0.mlp.up_proj"), {"fine_tune_type": "full"}, "whole layers"),
        (factors("model.layers.0.mlp.up_proj"), {"lora_parameters": None}, "lora_parameters"),
        (factors("model.layers.0.mlp.up_proj"), {"lora_parameters": {"rank": 3}}, "scale"),
        (factors("model.layers.0.mlp.up_proj"), {"lora_parameters": {"rank": True, "scale": 1.0}}, "rank"),
        (factors("model.layers.0.mlp.up_proj", rank=4), {}, "says rank 3"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, {}, "is not a tensor of MLX-LM's LoRA"),
        ({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.ones(2, 3, 4)}, {}, "--base"),
        ({"model.layers.0.mlp.up_proj.lora_a": torch.ones(4, 3)}, {}, "lora_B"),
    ],
)
def test_what_is_no_adapter_of_mlx_lm(
    table: dict[str, torch.Tensor], config: dict[str, Any], said: str, call: Caller, tmp_path: Path
) -> None:
    called = call("convert", written(tmp_path / "theirs", table, **config), "--to", "peft", "-o", tmp_path / "out")
    assert called.code in (1, 3)
    assert said in called.err
    assert not (tmp_path / "out").exists()


def test_layers_that_mlx_lm_has_elsewhere(call: Caller, tmp_path: Path) -> None:
    base, _ = adapters_of(tmp_path, "gpt_neox", {"target_modules": ["dense"]})
    hidden = load_model(base, "causal-lm").config.hidden_size
    theirs = written(tmp_path / "theirs", factors("model.h.1.attention.dense", hidden, hidden))
    assert call("convert", theirs, "--to", "peft", "--base", base).code == 0
    back = tmp_path / "theirs-peft"
    name = f"{PREFIX}gpt_neox.layers.1.attention.dense"
    assert set(saved_tensors(back)) == {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
    expected = in_mlx(theirs)["model.h.1.attention.dense"].T
    assert farthest({name: deltas(base, back)[name]}, {name: expected}) <= EXACT
    assert not verify(back).report.findings


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # MLX-LM has no such word, and PEFT sets it
def test_modules_of_one_name_in_a_layer_come_back_under_the_base_s_names(call: Caller, tmp_path: Path) -> None:
    lora = {"target_modules": ["attn.c_proj", "mlp.c_proj"], "fan_in_fan_out": True}
    base, (adapter,) = adapters_of(tmp_path, "gpt2", lora)
    theirs = tmp_path / "theirs"
    assert call("convert", adapter, "--to", "mlx", "--base", base, "-o", theirs).code == 0
    assert call("convert", theirs, "--to", "peft", "--base", base, "-o", tmp_path / "back").code == 0
    assert different(saved_tensors(tmp_path / "back"), saved_tensors(adapter)) == []
    assert deltas(base, tmp_path / "back").keys() == deltas(base, adapter).keys()


def test_mlx_lm_itself_reads_and_writes_them(call: Caller, tmp_path: Path) -> None:
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'mlx[cpu]' mlx-lm")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    tuner = pytest.importorskip("mlx_lm.tuner.utils", reason="mlx-lm is not installed")
    trees = pytest.importorskip("mlx.utils", reason="mlx is not installed")
    base, (adapter,) = adapters_of(tmp_path, "llama", SOME_LAYERS | {"layers_to_transform": [0], "use_rslora": True})
    config = json.loads((base / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (base / "config.json").write_text(json.dumps(config))

    def of_peft(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = PeftModel.from_pretrained(load_model(base, "causal-lm"), folder)(
                torch.tensor([TOKENS])
            ).logits[0]
        return logits

    def of_mlx(model: Any) -> torch.Tensor:
        return torch.tensor(model(mlx.array([TOKENS]))[0].tolist())

    assert call("convert", adapter, "--to", "mlx", "-o", tmp_path / "theirs").code == 0
    served = utils.load_adapters(utils.load_model(base)[0], str(tmp_path / "theirs"))
    assert torch.allclose(of_mlx(served), of_peft(adapter), rtol=0, atol=2e-5)
    for kind in ("lora", "dora"):
        trained, _ = utils.load_model(base)
        parameters = {"rank": 5, "scale": 3.7, "dropout": 0.0}
        trained.freeze()
        tuner.linear_to_lora_layers(trained, 1, parameters, use_dora=kind == "dora")
        trainable = trees.tree_flatten(trained.trainable_parameters())
        held = {name: mlx.random.normal(value.shape) * 0.1 for name, value in trainable}
        held |= {name: mlx.abs(value) + 1 for name, value in held.items() if name.endswith(".m")}
        trained.load_weights(list(held.items()), strict=False)
        folder = tmp_path / kind
        folder.mkdir()
        mlx.save_safetensors(str(folder / "adapters.safetensors"), held)
        (folder / "adapter_config.json").write_text(
            json.dumps({"fine_tune_type": kind, "num_layers": 1, "lora_parameters": parameters})
        )
        assert call("convert", folder, "--to", "peft", "--base", base).code == 0
        assert torch.allclose(of_peft(tmp_path / f"{kind}-peft"), of_mlx(trained), rtol=0, atol=2e-5)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_one_stack(model_type: str, call: Caller, tmp_path: Path) -> None:
    base, (fused,) = adapters_of(tmp_path, model_type, FUSED)
    single, theirs, back = tmp_path / "single", tmp_path / "theirs", tmp_path / "back"
    assert call("convert", fused, "--to", "peft-experts", "--base", base, "-o", single).code == 0
    assert call("convert", single, "--to", "mlx", "-o", theirs).code == 0
    assert call("convert", theirs, "--to", "peft", "--base", base, "-o", back).code == 0
    assert different(saved_tensors(back), saved_tensors(single)) == []
    table = load_file(theirs / "adapters.safetensors")
    assert {tensor.dim() for name, tensor in table.items() if "switch_mlp" in name} == {3}
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'mlx[cpu]' mlx-lm")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    model = load_model(base, "causal-lm")
    config = json.loads((base / "config.json").read_text())  # MLX-LM wants what transformers 5 leaves out
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "num_experts": config.get("num_local_experts")}
    config |= {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    (base / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        expected = PeftModel.from_pretrained(model, fused)(torch.tensor([TOKENS])).logits[0]
    served = utils.load_adapters(utils.load_model(base)[0], str(theirs))
    found = torch.tensor(served(mlx.array([TOKENS]))[0].tolist())
    assert torch.allclose(found, expected, rtol=0, atol=2e-5)

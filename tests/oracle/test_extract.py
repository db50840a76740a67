"""Adapters out of fine-tuned models, against a dense singular value decomposition in float64, and against PEFT's logits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTForImageClassification

from lora_tool import extract, merge, resize, validate, verify
from lora_tool.core.errors import FindingsFound, IncompatibleBase, NotACheckpoint, UnsupportedAdapter, WrongValue
from lora_tool.core.keys import PREFIX
from lora_tool.formats.files import read_json
from lora_tool.formats.stored_numbers import Matrix
from lora_tool.formats.weights import read_single
from lora_tool.plans.algebra.krylov import nearest
from tests.mutations import FIXTURES
from tests.oracle.peft_merge import different, load_model, save_adapter, save_base, saved_tensors
from tests.oracle.test_combine import ALL, QV, deltas
from tests.oracle.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("typed_hints")
FROM_THE_BEST = 1.002


def graded(out: int, width: int, power: float, seed: int) -> Matrix:
    """Return a matrix whose singular values fall as i^-power."""
    rng = np.random.default_rng(seed)
    rank = min(out, width)
    left, right = np.linalg.qr(rng.standard_normal((out, rank))).Q, np.linalg.qr(rng.standard_normal((width, rank))).Q
    return np.asarray((left * np.arange(1.0, rank + 1) ** -power) @ right.T)


@pytest.mark.parametrize(
    ("out", "width", "rank", "power"),
    [
        (300, 120, 16, 0.3),
        (300, 120, 16, 1.5),
        (90, 260, 8, 0.7),
        (64, 64, 64, 4.0),
        (40, 500, 1, 0.3),
        (40, 500, 1, 4.0),
    ],
)
def test_no_product_of_the_rank_is_much_nearer(out: int, width: int, rank: int, power: float, tmp_path: Path) -> None:
    before = torch.tensor(np.random.default_rng(1).standard_normal((out, width)) * 0.02).to(torch.bfloat16)
    after = (before.double() + 0.05 * torch.tensor(graded(out, width, power, 2))).to(torch.bfloat16)
    for name, tensor in (("before", before), ("after", after)):
        save_file({"w": tensor}, tmp_path / name)
    tables = [read_single(tmp_path / name).tensors["w"] for name in ("after", "before")]
    found = nearest(*tables, rank=rank)
    difference = after.double() - before.double()
    values = torch.linalg.svdvals(difference)
    product = torch.tensor(found.b).double() @ torch.tensor(found.a).double()
    best, explicit = float(values[rank:].norm()), float((difference - product).norm())
    assert explicit <= best * FROM_THE_BEST + 1e-6 * float(difference.norm())
    assert found.residual == pytest.approx(explicit, rel=1e-4, abs=1e-5 * float(difference.norm()))
    assert found.norm == pytest.approx(float(difference.norm()), rel=1e-6)


def merged_model(folder: Path, model_type: str, lora: dict[str, Any], dtype: torch.dtype) -> tuple[Path, Path, Path]:
    """Return a base, an adapter, and the model that a merge of the two is."""
    base = save_base(folder / "base", model_type, "causal-lm", dtype)
    adapter = save_adapter(folder / "adapter", base, "causal-lm", lora)
    return base, adapter, merge(adapter, out=folder / "model").path


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [("llama", ALL), ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True})],
)
def test_a_merged_adapter_comes_back(model_type: str, lora: dict[str, Any], tmp_path: Path) -> None:
    base, adapter, model = merged_model(tmp_path, model_type, lora, torch.float32)
    out = extract(model, base, rank=lora["r"], out=tmp_path / "out").path
    expected, found = deltas(base, adapter), deltas(base, out)
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        assert float((found[name] - delta).norm()) <= 1e-5 * float(delta.norm())
    assert not validate(out, base=base).findings
    assert not verify(out).report.findings


def test_what_rounding_explains_is_told_beside_what_is_left(tmp_path: Path) -> None:
    base, _, model = merged_model(tmp_path, "llama", ALL, torch.bfloat16)
    done = extract(model, base, rank=4, out=tmp_path / "out")
    for module in done.plan.manifest["modules"]:
        assert module["kept"] > 0.97  # of what is no noise
        assert module["residual"] == pytest.approx(module["rounding_noise"], rel=0.5)
    least = extract(model, base, keep=0.95, out=tmp_path / "least")
    assert {module["rank"] for module in least.plan.manifest["modules"]} <= {1, 2, 3, 4}
    assert not verify(least).report.findings


def test_a_full_reward_model_and_its_causal_base_give_a_reward_adapter(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    adapter = save_adapter(tmp_path / "rm", base, "seq-cls", QV | {"modules_to_save": ["norm"]}, num_labels=1)
    model = merge(adapter, out=tmp_path / "model", task="reward").path
    out = extract(model, base, rank=6, out=tmp_path / "out").path
    config = read_json(out / "adapter_config.json")
    assert config["task_type"] == "SEQ_CLS"
    assert {"score", "model.norm"} <= set(config["modules_to_save"])  # PEFT's "norm" means every layer's, too
    assert torch.equal(saved_tensors(out)[f"{PREFIX}score.weight"], saved_tensors(model)["score.weight"])
    tokens = torch.tensor([[5, 17, 3, 42, 8]])
    with torch.no_grad():
        expected = load_model(model, "seq-cls", 1)(tokens).logits
        found = PeftModel.from_pretrained(load_model(base, "seq-cls", 1), out)(tokens).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not validate(out, base=base, task="reward").findings
    assert not verify(out).report.findings


@pytest.mark.parametrize(("model_type", "everything"), [("roberta", True), ("distilbert", False), ("roberta", False)])
def test_peft_loads_a_head_of_several_layers_whole(model_type: str, everything: bool, tmp_path: Path) -> None:
    """PEFT saves what is called `classifier`, also as the end of `pre_classifier`, and misses what is not in the file."""
    base = save_base(tmp_path / "base", model_type, "seq-cls", torch.float32)
    model = tiny_model(model_type, "seq-cls")
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if everything or "classifier" not in name or name.endswith(("out_proj.weight", ".classifier.weight")):
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    model.save_pretrained(tmp_path / "tuned")
    out = extract(tmp_path / "tuned", base, rank=64, out=tmp_path / "out").path
    loaded = PeftModel.from_pretrained(load_model(base, "seq-cls"), out).merge_and_unload().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(loaded[name], tensor, rtol=0, atol=1e-5), name
    assert not validate(out, base=base).findings
    assert not verify(out).report.findings


def test_names_that_peft_does_not_find_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model: Any = ViTForImageClassification(ViTConfig(**sizes, image_size=56, patch_size=14, num_labels=3))
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in (each for name, each in model.named_parameters() if "attention" in name):
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(UnsupportedAdapter, match="transformers has another name for `vit.encoder.layer.0") as refused:
        extract(tmp_path / "tuned", tmp_path / "base", rank=4, out=tmp_path / "out")
    assert refused.value.hint


def test_changed_biases_embeddings_and_saved_modules_are_exact(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.float32)
    model = tiny_model("qwen2", "causal-lm")
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    tuned = tmp_path / "tuned"
    model.save_pretrained(tuned)
    out = extract(tuned, base, rank=64, save=["o_proj"], out=tmp_path / "out").path
    again = merge(out, base=base, out=tmp_path / "again", dtype="float32").path
    ours, theirs = saved_tensors(again), saved_tensors(tuned)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=2e-6), name
    exact = [name for name in theirs if "proj" not in name or "o_proj" in name or name.endswith("bias")]
    assert different({n: ours[n] for n in exact}, {n: theirs[n] for n in exact}) == []
    assert not verify(out).report.findings


def test_a_changed_factor_is_found(tmp_path: Path) -> None:
    base, _, model = merged_model(tmp_path, "llama", QV, torch.float32)
    out = extract(model, base, rank=4, out=tmp_path / "out").path
    table = load_file(out / "adapter_model.safetensors")
    name = next(name for name in table if "lora_B" in name)
    table[name][2] *= 1.5
    save_file(table, out / "adapter_model.safetensors")
    (finding,) = verify(out).report.findings
    assert (finding.code, finding.subject) == ("LT626", name)


def test_what_is_no_adapter_is_refused_by_name(tmp_path: Path) -> None:
    base, _, model = merged_model(tmp_path, "llama", QV, torch.float32)
    other = save_base(tmp_path / "other", "qwen2", "causal-lm", torch.float32)
    with pytest.raises(IncompatibleBase, match="a llama, .* a qwen2"):
        extract(model, other, rank=4, out=tmp_path / "out")
    deeper = save_base(tmp_path / "deeper", "llama", "causal-lm", torch.float32, num_hidden_layers=3)
    with pytest.raises(IncompatibleBase, match="does not"):
        extract(model, deeper, rank=4, out=tmp_path / "out")
    with pytest.raises(WrongValue, match="give either"):
        extract(model, base, out=tmp_path / "out")
    with pytest.raises(UnsupportedAdapter, match="nothing differs"):
        extract(base, base, rank=4, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*lora-tool*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor + 1e30, "squares of their difference overflow"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), "is F8_E4M3 in .* no quantised weights"),
    ],
)
def test_weights_that_cannot_be_subtracted_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    base, _, model = merged_model(tmp_path, "llama", QV, torch.float32)
    for path in model.glob("*.safetensors"):
        table = load_file(path)
        save_file({n: change(t) if "up_proj" in n else t for n, t in table.items()}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedAdapter, match=message) as refused:
        extract(model, base, rank=4, out=tmp_path / "out")
    assert refused.value.hint


def test_a_share_that_no_rank_reaches_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, _, model = merged_model(tmp_path, "llama", ALL, torch.float32)
    monkeypatch.setattr("lora_tool.plans.algebra.plan_extract._LARGEST", (1, 2))
    with pytest.raises(UnsupportedAdapter, match="is not of low rank: rank 2 keeps") as refused:
        extract(model, base, keep=0.999, out=tmp_path / "out")
    assert "`save=" in str(refused.value.hint)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_tied_output_layer_changes_with_its_embedding(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.float32, tie_word_embeddings=True)
    model = tiny_model("qwen2", "causal-lm", tie_word_embeddings=True)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    model.save_pretrained(tmp_path / "tuned")
    out = extract(tmp_path / "tuned", base, rank=64, out=tmp_path / "out").path
    again = merge(out, base=base, out=tmp_path / "again", dtype="float32").path
    tokens = torch.tensor([[5, 17, 3, 42, 8]])
    with torch.no_grad():
        expected = model(tokens).logits
        unmerged = PeftModel.from_pretrained(load_model(base, "causal-lm"), out)(tokens).logits
        merged = load_model(again, "causal-lm")(tokens).logits
    assert torch.allclose(unmerged, expected, atol=1e-5)
    assert torch.allclose(merged, expected, atol=1e-5)
    assert not verify(out).report.findings


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")  # PEFT's own patterns
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_peft_loads_experts_that_changed_by_different_ranks(model_type: str, tmp_path: Path) -> None:
    """It stacks the factors of a layer's experts, of gate and up, and takes the rank of all stacks from `r`."""
    base, tuned = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32), tmp_path / "tuned"
    shutil.copytree(base, tuned)
    generator = torch.Generator().manual_seed(0)
    for path in tuned.glob("*.safetensors"):
        table = load_file(path)
        for name, tensor in [*table.items()]:
            expert = re.search(r"layers\.0\..*experts\.(\d+)\.(w1|w2|gate_proj|down_proj)\.", name)
            rank = 1 + int(expert[1]) if expert else 4 if "layers.1.self_attn.q_proj.weight" in name else 0
            if rank and not name.endswith("experts.1.w2.weight"):
                left, right = (torch.randn(shape, generator=generator) for shape in ((len(tensor), rank), (rank, 32)))
                table[name] = tensor + 0.02 * left @ right[:, torch.arange(tensor.shape[1]) % 32]
        save_file(table, path, metadata={"format": "pt"})
    tokens = torch.tensor([[5, 17, 3, 42, 8]])
    with torch.no_grad():
        expected = load_model(tuned, "causal-lm")(tokens).logits
    out = extract(tuned, base, keep=1 - 1e-6, out=tmp_path / "out").path
    small = resize(out, keep=0.7, out=tmp_path / "small").path
    shapes = {tuple(t.shape) for n, t in load_file(small / "adapter_model.safetensors").items() if "experts" in n}
    assert len({min(shape) for shape in shapes}) == 1
    for adapter, furthest in ((out, 1e-5), (small, 1.0)):
        assert not verify(adapter).report.findings
        with torch.no_grad():
            found = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)(tokens).logits
        assert float((found - expected).abs().max()) <= furthest


def tuned_of(base: Path, folder: Path, changed: str) -> Path:
    """Return a copy of the base in which the tensors that match `changed` are others."""
    shutil.copytree(base, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        table = load_file(path)
        for name in filter(re.compile(changed).search, [*table]):
            table[name] = table[name] + 0.02 * torch.randn(table[name].shape, generator=generator)
        save_file(table, path, metadata={"format": "pt"})
    return folder


HARD_TO_PLACE = {
    "one bias of many": ("opt", r"layers\.0\.fc1\.(weight|bias)"),
    "out_proj of Mamba": ("mamba", r"in_proj\.weight|out_proj"),
    "a shared expert": ("qwen3_next", r"layers\.0\..*(k_proj|shared_expert\.gate_proj|experts\.1\.gate_proj)"),
    "experts alone, down": ("olmoe", r"layers\.1\..*experts\.2\.down_proj"),
    "a router and its buffer": ("glm4_moe", r"mlp\.gate\.|q_proj"),
    "tied ends of a mixture": ("olmoe", r"embed_tokens|layers\.0\..*q_proj"),
}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")  # PEFT's own patterns
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("case", HARD_TO_PLACE)
def test_peft_loads_every_change(case: str, tmp_path: Path) -> None:
    model_type, changed = HARD_TO_PLACE[case]
    tied = {"tie_word_embeddings": True} if "tied" in case else {}
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32, **tied)
    tuned = tuned_of(base, tmp_path / "tuned", changed)
    out = extract(tuned, base, rank=64, out=tmp_path / "out").path
    tokens = torch.tensor([[5, 17, 3, 42, 8]])
    with torch.no_grad():
        before, expected = (load_model(each, "causal-lm")(tokens).logits for each in (base, tuned))
        found = PeftModel.from_pretrained(load_model(base, "causal-lm"), out)(tokens).logits
    assert not torch.allclose(before, expected, atol=1e-4)
    assert torch.allclose(found, expected, atol=1e-5)
    assert {finding.code for finding in validate(out, base=base).findings} <= {"LT208"}  # experts that did not change
    assert not verify(out).report.findings


NO_PLACE = {
    "qwen2_moe": (r"experts\.0\.up_proj", "PEFT finds no single experts of a qwen2_moe"),
    "gpt_neox": (r"embed_out|layers\.0\.attention\.dense\.weight", "another name for `embed_out`"),
}


@pytest.mark.parametrize("model_type", NO_PLACE)
def test_a_change_that_peft_would_not_load_is_refused(model_type: str, tmp_path: Path) -> None:
    changed, message = NO_PLACE[model_type]
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32)
    with pytest.raises(UnsupportedAdapter, match=message) as refused:
        extract(tuned_of(base, tmp_path / "tuned", changed), base, rank=4, out=tmp_path / "out")
    assert refused.value.hint


def test_embeddings_of_encoder_and_decoder_are_refused(tmp_path: Path) -> None:
    tiny_model("t5", "seq-2-seq-lm").save_pretrained(tmp_path / "base")
    tuned = tuned_of(tmp_path / "base", tmp_path / "tuned", r"shared|block\.0\.layer\.0\.SelfAttention\.q")
    with pytest.raises(UnsupportedAdapter, match="encoder and decoder have it as their embeddings"):
        extract(tuned, tmp_path / "base", rank=4, out=tmp_path / "out")
    others = tuned_of(
        tmp_path / "base", tmp_path / "others", r"relative_attention_bias|block\.0\.layer\.0\.SelfAttention\.q"
    )
    out = extract(others, tmp_path / "base", rank=4, out=tmp_path / "out").path
    assert len([name for name in saved_tensors(out) if "relative_attention_bias.weight" in name]) == 2


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged model, whose manifest names its base."""
    place = tmp_path_factory.mktemp("pair")
    base = shutil.copytree(FIXTURES / "causal-llama" / "base", place / "base")
    return merge(FIXTURES / "causal-llama" / "adapter", base=base, out=place / "merged", ignore=["LT520"]).path


def test_the_base_is_the_one_that_the_model_names(named: Path, tmp_path: Path) -> None:
    model = shutil.copytree(named, tmp_path / "model")
    (model / "lora_tool.json").unlink()
    with pytest.raises(NotACheckpoint, match="no file of this model names the base model") as refused:
        extract(model, None, rank=4, out=tmp_path / "none")
    assert refused.value.hint == "give the model that it was trained from: `base=MODEL`"
    config = read_json(model / "config.json")
    (model / "config.json").write_text(json.dumps({**config, "_name_or_path": str(named.parent / "base")}))
    for each in (named, model):
        out = extract(each, None, rank=4, out=tmp_path / each.parent.name / "out").path
        assert read_json(out / "lora_tool.json")["inputs"]["base"]["path"] == str(named.parent / "base")
    (model / "config.json").write_text(json.dumps({**config, "_name_or_path": "../gone"}))
    with pytest.raises(NotACheckpoint, match=r"model/config\.json names the base \.\./gone: "):
        extract(model, None, rank=4, out=tmp_path / "gone")


@pytest.mark.parametrize("whose", ["model", "base"])
def test_files_that_are_cut_off_are_the_rules(whose: str, named: Path, tmp_path: Path) -> None:
    pair = {"model": named, "base": named.parent / "base"}
    pair[whose] = shutil.copytree(pair[whose], tmp_path / whose)
    first = min(pair[whose].glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-9])
    for ignored in ((), ("LT101",)):
        with pytest.raises(FindingsFound, match="LT101"):
            extract(pair["model"], pair["base"], rank=4, out=tmp_path / "out", ignore=ignored)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_nan_is_named_where_it_is(name: str, named: Path, tmp_path: Path) -> None:
    model = shutil.copytree(named, tmp_path / "model")
    (path,) = (each for each in model.glob("*.safetensors") if name in load_file(each))
    weights = load_file(path)
    weights[name].view(-1)[3] = torch.nan
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(UnsupportedAdapter, match=rf"model/{path.name}: `{name}` holds NaN or infinity"):
        extract(model, named.parent / "base", rank=4, out=tmp_path / "out")

"""Reward models averaged and stacked: ΔW and heads against float64, scores against models built by hand, refusals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lora_tool import combine, merge, plan_merge, verify
from lora_tool.core.errors import FindingsFound, IncompatibleBase, UnsupportedAdapter, WrongValue
from lora_tool.formats.files import read_json
from lora_tool.plans.algebra.plan_combine import plan_combine
from lora_tool.workflows.inspect import InspectEachOptions, inspect_each
from lora_tool.workflows.inspection.model import AdapterInspection
from tests.judging import judge, lines
from tests.oracle.peft_merge import FP32, load_model, save_adapter, save_base, saved_tensors
from tests.oracle.test_combine import EXACT, QV, deltas, farthest, summed
from tests.typed import type_it

pytestmark = pytest.mark.usefixtures("typed_hints")

HEAD = "base_model.model.score.weight"
WEIGHTS = [1.0, 2.0, 1.0]
SHARES = [0.25, 0.5, 0.25]


def rewritten(adapter: Path, seed: int, *, apart: bool = False, dtype: torch.dtype = FP32) -> Path:
    """Give an adapter values of its own, and a head that is near a common one, or `apart` from it."""
    generator, table = torch.Generator().manual_seed(seed), {}
    for name, tensor in saved_tensors(adapter).items():
        begun = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed if apart else 99)) / 10
        noise = torch.randn(tensor.shape, generator=generator) / 30
        table[name] = ((tensor if "lora_" in name else begun) + noise).to(dtype)
    save_file(table, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    return adapter


def three(folder: Path, model_type: str = "qwen2", labels: int = 1, **lora: Any) -> tuple[Path, list[Path]]:
    base = save_base(folder / "base", model_type, "causal-lm" if model_type == "qwen2" else "seq-cls", FP32)
    loras = (QV | lora, QV | lora | {"r": 3}, QV | lora | {"use_rslora": True})
    made = (save_adapter(folder / f"a{at}", base, "seq-cls", each, num_labels=labels) for at, each in enumerate(loras))
    return base, [rewritten(each, at) for at, each in enumerate(made)]


def scores(model: PreTrainedModel) -> torch.Tensor:
    torch.manual_seed(0)
    model.config.pad_token_id = 1
    with torch.no_grad():
        found: torch.Tensor = model.double().eval()(torch.randint(5, 40, (3, 7))).logits
    return found


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "reward": ("qwen2", 1, {}),
    "labels": ("qwen2", 3, {}),
    "two-layer-head-with-biases": ("camembert", 7, {"target_modules": ["query", "value"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mean_is_that_of_float64_and_scores_as_the_model_built_by_hand(name: str, tmp_path: Path) -> None:
    model_type, labels, lora = CASES[name]
    base, adapters = three(tmp_path, model_type, labels, **lora)
    out = combine(adapters, weights=WEIGHTS, average=True, out=tmp_path / "out").path
    parts = [with_labels(base, each, labels) for each in adapters]
    expected = summed(list(zip(SHARES, parts, strict=True)))
    assert farthest(with_labels(base, out, labels), expected) <= EXACT
    heads = [name for name in saved_tensors(out) if "lora_" not in name]
    assert heads
    tables = [saved_tensors(each) for each in adapters]
    for head in heads:
        mean = sum(share * table[head].double() for share, table in zip(SHARES, tables, strict=True))
        assert torch.equal(saved_tensors(out)[head], torch.as_tensor(mean).float())
    assert verify(out).report.findings == ()
    named = [f"{path}={weight:g}" for path, weight in zip(adapters, WEIGHTS, strict=True)]
    merged = merge(named, base=base, average=True, out=tmp_path / "merged").path
    assert verify(merged).report.findings == ()
    by_hand = load_model(base, "seq-cls", labels).double()
    with torch.no_grad():
        for module, delta in expected.items():
            by_hand.get_submodule(module.removeprefix("base_model.model.")).weight.add_(delta)
        for head in heads:
            mean = sum(share * table[head].double() for share, table in zip(SHARES, tables, strict=True))
            by_hand.get_parameter(head.removeprefix("base_model.model.")).copy_(torch.as_tensor(mean))
    assert torch.allclose(scores(load_model(merged, "seq-cls", labels)), scores(by_hand), rtol=0, atol=1e-6)


def with_labels(base: Path, adapter: Path, labels: int) -> dict[str, torch.Tensor]:
    """Return what PEFT computes as ΔW of every module of a classifier with so many labels, in float64."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(base, "seq-cls", labels), adapter).double()
    layers: Any = ((name, each) for name, each in model.named_modules() if hasattr(each, "get_delta_weight"))
    return {name: layer.get_delta_weight("default").detach() for name, layer in layers if layer.lora_A}


def test_heads_in_16_bits_and_at_a_lower_rank(tmp_path: Path) -> None:
    base, adapters = three(tmp_path)
    for at, each in enumerate(adapters):
        rewritten(each, at + 5, dtype=torch.bfloat16)
    out = combine(adapters, average=True, rank=4, out=tmp_path / "out").path
    mean = torch.stack([saved_tensors(each)[HEAD].double() for each in adapters]).mean(dim=0)
    assert torch.allclose(saved_tensors(out)[HEAD].double(), mean, rtol=1e-7, atol=0)
    assert verify(out).report.findings == ()
    table = saved_tensors(out)
    table[HEAD] = saved_tensors(adapters[0])[HEAD].float()
    save_file(table, out / "adapter_model.safetensors", metadata={"format": "pt"})
    assert {finding.code for finding in verify(out).report.findings} == {"LT626"}
    assert base.is_dir()


def test_equal_heads_are_kept_and_adapters_without_any_are_averaged(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", FP32)
    one, other = (save_adapter(tmp_path / name, base, "causal-lm", QV) for name in "ab")
    rewritten(other, 3)
    out = combine([one, other], average=True, out=tmp_path / "out").path
    assert farthest(deltas(base, out), summed([(0.5, deltas(base, one)), (0.5, deltas(base, other))])) <= EXACT
    assert lines(judge(one, base=base, adapters=[other], average=True)) == []


def test_heads_of_other_beginnings_are_refused(tmp_path: Path) -> None:
    base, (one, other, apart) = three(tmp_path)
    rewritten(apart, 8, apart=True)
    with pytest.raises(FindingsFound, match=r"LT530.*cosine of the heads of .*a0 and .*a2") as refused:
        plan_combine([one, other, apart], average=True)
    assert {finding.code for finding in refused.value.report.findings} == {"LT530"}
    with pytest.raises(FindingsFound, match="LT530"):
        merge([one, apart], base=base, average=True, out=tmp_path / "never")
    kept = combine([one, apart], average=True, head_of=apart, out=tmp_path / "kept").path
    assert torch.equal(saved_tensors(kept)[HEAD], saved_tensors(apart)[HEAD])
    shown = inspect_each([one, other, apart], InspectEachOptions())
    heads = [each.head[0] for each in shown if isinstance(each, AdapterInspection)]
    first, near, far = (saved_tensors(each)[HEAD].double().flatten() for each in (one, other, apart))
    cosines = [None, *(float(torch.cosine_similarity(first, each, dim=0)) for each in (near, far))]
    assert [head.cosine for head in heads] == pytest.approx(cosines)
    assert [head.norm for head in heads] == pytest.approx([float(each.norm()) for each in (first, near, far)])
    halves = summed([(0.5, with_labels(base, each, 1)) for each in (one, apart)])
    assert farthest(with_labels(base, kept, 1), halves) <= EXACT
    ignored = combine([one, apart], average=True, ignore=["LT530"], out=tmp_path / "ignored").path
    for out in (kept, ignored):
        assert verify(out).report.findings == ()


def test_what_has_no_mean_is_refused_by_name(tmp_path: Path) -> None:
    base, (one, _, other) = three(tmp_path)
    several = save_adapter(tmp_path / "several", base, "seq-cls", QV, num_labels=2)
    headless = save_adapter(tmp_path / "headless", base, "seq-cls", QV, num_labels=1)
    table = {name: tensor for name, tensor in saved_tensors(headless).items() if name != HEAD}
    save_file(table, headless / "adapter_model.safetensors", metadata={"format": "pt"})
    normed = save_adapter(tmp_path / "normed", base, "seq-cls", QV | {"modules_to_save": ["norm"]}, num_labels=1)
    dora = save_adapter(tmp_path / "dora", base, "seq-cls", QV | {"use_dora": True}, num_labels=1)
    tokens = QV | {"trainable_token_indices": {"embed_tokens": [3]}}
    with_tokens = save_adapter(tmp_path / "tokens", base, "seq-cls", tokens, num_labels=1)
    for wrong, message in (
        (several, r"LT512.*`score\.weight`: is \[1, 32\] in one adapter and \[2, 32\] in the other"),
        (headless, r"LT301.*score"),
        (normed, r"LT512.*layernorm\.weight`: is saved whole in only one of the two adapters"),
        (dora, r"LT512.*DoRA"),
        (with_tokens, r"LT512.*has trained tokens in only one"),
    ):
        with pytest.raises((FindingsFound, UnsupportedAdapter), match=message):
            plan_combine([one, wrong], average=True)
        with pytest.raises((FindingsFound, UnsupportedAdapter), match=message):
            plan_merge(base, [one, wrong], average=True)
    with pytest.raises(FindingsFound, match="LT512") as refused:
        plan_combine([one, other])
    (finding,) = refused.value.report.findings
    assert finding.hint is not None
    assert finding.hint.startswith(f"the mean of the models: lora-tool combine {one} {other} --average -o OUT")
    assert "merge one, then the other" not in finding.hint
    with pytest.raises(WrongValue, match="add up to 0"):
        plan_combine([one, other], weights=[1.0, -1.0], average=True)


def copied_with(adapter: Path, name: str, *, head: float, scaled: bool = False) -> Path:
    """Copy an adapter under a name with `head` added to its head; `scaled` with 2·B and alpha / 2, which is the same ΔW."""
    other = Path(shutil.copytree(adapter, adapter.with_name(name)))
    table = saved_tensors(other)
    for each, tensor in saved_tensors(other).items():
        table[each] = tensor + head if each == HEAD else tensor * 2 if scaled and "lora_B" in each else tensor
    save_file(table, other / "adapter_model.safetensors", metadata={"format": "pt"})
    config = read_json(other / "adapter_config.json")
    alpha = config["lora_alpha"] / (2 if scaled else 1)
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": alpha}))
    return other


def test_heads_of_one_trunk_are_stacked(tmp_path: Path) -> None:
    base, (one, _, _) = three(tmp_path)
    adapters = [one, copied_with(one, "kind", head=1.0), copied_with(one, "short", head=-0.5, scaled=True)]
    out = combine(adapters, stack=True, out=tmp_path / "out").path
    assert torch.equal(saved_tensors(out)[HEAD], torch.cat([saved_tensors(each)[HEAD] for each in adapters]))
    assert [each["label"] for each in read_json(out / "lora_tool.json")["head"]] == ["a0", "kind", "short"]
    assert verify(out).report.findings == ()
    assert lines(judge(out, base=base)) == []
    merged = merge(out, base=base, out=tmp_path / "merged").path
    alone = [merge(each, base=base, task="reward", out=tmp_path / f"m{at}").path for at, each in enumerate(adapters)]
    columns = [scores(load_model(each, "seq-cls", 1)) for each in alone]
    assert torch.allclose(scores(load_model(merged, "seq-cls", 3)), torch.cat(columns, dim=1), rtol=0, atol=1e-6)
    table = saved_tensors(out)
    for name in (HEAD, next(name for name in table if "lora_B" in name)):
        wrong = {**table, name: table[name].flip(0).contiguous()}
        save_file(wrong, out / "adapter_model.safetensors", metadata={"format": "pt"})
        (finding,) = verify(out).report.findings
        assert finding.code in ("LT605", "LT626")


def test_what_cannot_be_stacked_is_refused_by_name(tmp_path: Path) -> None:
    base, (one, unlike, _) = three(tmp_path)
    moved = rewritten(copied_with(one, "moved", head=0.0), 4)
    fewer = save_adapter(tmp_path / "fewer", base, "seq-cls", QV | {"target_modules": ["q_proj"]}, num_labels=1)
    for other, message in (
        (moved, r"layers\.0\.self_attn\.q_proj` has another ΔW in .*moved than in .*a0"),
        (unlike, "has another ΔW in"),
        (fewer, "only one of .*a0 and .*fewer has LoRA on `model.layers.0.self_attn.v_proj`"),
    ):
        with pytest.raises(IncompatibleBase, match=message):
            combine([one, other], stack=True, out=tmp_path / "never")
    asked: tuple[dict[str, Any], ...] = ({"rank": 2}, {"weights": [1, 2]}, {"average": True})
    for each in asked:
        with pytest.raises(WrongValue, match=f"so {next(iter(each))} has no meaning"):
            combine([one, moved], stack=True, out=tmp_path / "never", **each)
    assert not (tmp_path / "never").exists()


def test_the_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / ".github" / "docs" / "combining.md").read_text()
    typed = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines()
    _, adapters = three(tmp_path)
    for adapter, name in zip(adapters, "ABC", strict=True):
        adapter.rename(tmp_path / name)
    for name, head in (("helpful", 1.0), ("safe", -1.0)):
        copied_with(tmp_path / "A", name, head=head)
    monkeypatch.chdir(tmp_path)
    assert len(typed) == 3
    for line in typed:
        words = shlex.split(line)
        assert words.pop(0) == "lora-tool"
        if words[0] == "combine":
            shutil.rmtree("OUT", ignore_errors=True)
        code, printed = type_it(tuple(words), {})
        assert code == 0, printed

"""Merges into quantised bases that went wrong in the ways in which they do: each is named, and a right one is silent."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_tool import verify
from lora_tool.checkpoints import open_model
from lora_tool.core.report import Finding
from lora_tool.formats.safetensors import scan_file
from lora_tool.verification.validating import validate
from lora_tool.workflows.inspection.comparison import compare_models
from tests.judging import codes
from tests.mutations import copy_of
from tests.mutations.merged_models import quantised
from tests.oracle.peft_merge import Table, merge_with_ours, saved_tensors
from tests.oracle.quantised_bases import BF16, Made, delta, numbers_of
from tests.oracle.test_quantised_bases import is_linear
from tests.quantised_models import FORMS

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
QUERY, KEY, UP = (
    f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
)


class Case:
    """A plain base, its quantised form, an adapter, and what a merge into dequantised weights writes."""

    def __init__(self, made: Made, form: str, root: Path, lora: dict[str, Any] = LORA) -> None:
        self.root = root
        self.plain, self.base, self.values = made.base("qwen3-one", form, is_linear)
        self.adapter = made.adapter("qwen3-one", lora)
        self.stored, self.change = saved_tensors(self.base), delta(self.adapter, QUERY.removesuffix(".weight"))
        self.merged = merge_with_ours(self.base, self.adapter, root / "merged", "float32", store="all-16bit")
        self.right = saved_tensors(self.merged)

    def judged(self, changes: Table, *, config: Path | None = None, over: Table | None = None) -> list[Finding]:
        """Return what verify finds in the merged model with these tensors, or in others, without a manifest."""
        folder = self.root / "wrong"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(config or self.plain, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = {**(self.right if over is None else over), **changes}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return list(verify(folder, base=self.base, adapters=[self.adapter]).report.findings)


@pytest.fixture(scope="module")
def case(made: Made) -> Callable[[str], Case]:
    return lambda form: made.once(("mutants", form), lambda root: Case(made, form, root))


def says(findings: list[Finding], name: str, words: str) -> bool:
    """Return whether LT627 says these words of a tensor, and of this one alone."""
    assert {(found.code, found.subject) for found in findings} == {("LT627", name)}, findings
    return words in findings[0].message


@pytest.mark.parametrize("form", ["fp8-block", "int4", "nvfp4", "nf4-double", "bnb-int8", "gptq"])
def test_a_right_merge_is_silent_without_its_manifest(form: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    made = case(form)
    assert not made.judged({})
    folder = merge_with_ours(made.base, made.adapter, tmp_path / "merged", "float32", store="touched-16bit")
    (folder / "lora_tool.json").unlink()
    assert not verify(folder, base=made.base, adapters=[made.adapter]).report.findings


def test_codes_without_a_config_that_says_so(case: Callable[[str], Case]) -> None:
    fp8 = case("fp8-block")
    lost = {found.code: found for found in fp8.judged({}, over=fp8.stored)}
    assert "(F8_E4M3), but config.json does not say so" in lost["LT322"].message


@pytest.mark.parametrize("form", ["fp8-block", "int4", "nvfp4", "nf4-double", "gptq"])
def test_a_quantised_model_is_compared_with_its_class(form: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    base = case(form).base
    report = validate(base)
    assert not codes(report)
    assert not {skipped.code for skipped in report.skipped} & {"LT317", "LT318", "LT319"}
    assert not codes(validate(base, base=case(form).plain))

    folder = shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors*"))
    stem = UP.removesuffix("weight")
    table = {name: each for name, each in case(form).stored.items() if not name.startswith(stem)}
    moved = {name.replace(stem, "model.layers.7.mlp.up_proj."): each for name, each in case(form).stored.items()}
    save_file({**table, **{n: each for n, each in moved.items() if ".7." in n}}, folder / "model.safetensors")
    with_eight = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(with_eight))
    found = {(each.code, each.subject): each.message for each in validate(folder).findings}
    assert "transformers would initialise it at random" in found["LT318", UP]
    assert "is not a tensor of Qwen3ForCausalLM" in found["LT319", "model.layers.7.mlp.up_proj.weight"]
    gate = UP.replace("up_proj", "gate_proj")
    assert found["LT317", gate] == "is [96, 64], but the config implies [128, 64]"
    assert {code for code, _ in found} <= {"LT317", "LT318", "LT319", "LT323", "LT326"}


@pytest.mark.parametrize("form", ["fp8-block", "bnb-int8"])
def test_what_is_stored_quantised_again_is_judged_by_its_codes(form: str, made: Made, tmp_path: Path) -> None:
    loud = Case(made, form, tmp_path, LORA | {"lora_alpha": 600})
    folder = merge_with_ours(loud.base, loud.adapter, tmp_path / "again", "float32", store="as-base")
    right, plain = saved_tensors(folder), loud.values[QUERY].double()
    of_type, most = (torch.float8_e4m3fn, 448.0) if form == "fp8-block" else (torch.int8, 127.0)
    scale = f"{QUERY}_scale_inv" if form == "fp8-block" else QUERY.replace("weight", "SCB")

    def stored(values: torch.Tensor) -> torch.Tensor:
        cut = values.float().clamp(-most, most)
        return (cut.round() if of_type is torch.int8 else cut).to(of_type)

    def judged(changes: Table) -> list[Finding]:
        return loud.judged(changes, config=loud.base, over=right)

    assert not judged({})
    added = judged({QUERY: stored(loud.stored[QUERY].double() + loud.change), scale: loud.stored[scale]})
    assert says(added, QUERY, "is ΔW added to the codes of the base's")
    undivided = judged({QUERY: stored(plain + loud.change), scale: loud.stored[scale]})
    assert says(undivided, QUERY, "without being divided by its scales")
    twice = merge_with_ours(folder, loud.adapter, tmp_path / "twice", "float32", store="as-base", ignore=("LT",))
    table = saved_tensors(twice)
    found = judged({QUERY: table[QUERY], scale: table[scale]})
    assert [each.code for each in found] == ["LT609"]
    larger = {scale: right[scale] * 2, QUERY: stored(right[QUERY].float() / 2)}
    raised = {each.code: each.message for each in judged(larger)}
    assert f"; scales of `{QUERY}` may only change with the largest value" in raised["LT605"]
    assert [each.subject for each in judged({scale: right[scale] / 2})] == [QUERY], "its codes are half of W + ΔW"


@pytest.mark.parametrize("form", ["fp8-block", "int4", "nf4-double"])
def test_quantised_models_differ_by_what_they_stand_for(form: str, case: Callable[[str], Case]) -> None:
    made = case(form)
    assert compare_models(open_model(made.base), open_model(made.base)).same
    found = {each.name: each for each in compare_models(open_model(made.base), open_model(made.merged)).differences}
    assert found.keys() == made.right.keys()
    assert found[QUERY].apart == pytest.approx(float(made.change.norm()), rel=0.02)
    assert found[QUERY].first == pytest.approx(float(made.values[QUERY].double().norm()), rel=1e-6)
    assert (found[KEY].apart or 0.0) <= 2**-8 * float(made.values[KEY].double().norm())


def test_a_quantised_base_is_merged_and_verified_without_torch(tmp_path: Path) -> None:
    adapter = copy_of("causal-llama/adapter", tmp_path)
    quantised(adapter.parent / "base", QUERY)
    call = f"merge({str(adapter)!r}, base={str(adapter.parent / 'base')!r}, out={str(tmp_path / 'out')!r})"
    code = f"import sys; from lora_tool import merge; {call}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lora_tool.verification.dequantised" in done.stdout.split()
    assert not {"torch", "transformers", "peft"} & set(done.stdout.split())


def misread(made: Case, of: str, value: int | None) -> torch.Tensor:
    """Return what a merge makes of QUERY where every scale in the tensor `of` is read as this value: 1, if there is none."""
    stem = QUERY.removesuffix("weight")
    module = {name: tensor for name, tensor in made.stored.items() if name.startswith((stem, stem[:-1] + "._"))}
    (name,) = [name for name in module if name.endswith(of)]
    powers = module[name].dtype is torch.uint8  # stored plus 127
    scales = torch.full(module[name].shape, (127 if powers else 1) if value is None else value)
    folder = made.root / "misread"
    folder.mkdir()
    shutil.copy(made.base / "config.json", folder)
    said = scan_file(made.base / "model-00001-of-00002.safetensors").metadata
    save_file({**module, name: scales.to(module[name].dtype)}, folder / "model.safetensors", dict(said))
    return (numbers_of(folder, QUERY).double() + made.change).to(BF16)


SCALES = {
    "fp8-channel": "weight_scale",
    "fp8-block-bf16": "weight_scale_inv",
    "fp8-powers": "weight_scale_inv",
    "fp8-tensor": "weight_scale",
    "int8-channel": "weight_scale",
    "torchao-int8": "weight_scale",
    "bnb-int8": "SCB",
    "fp4": "scale",
    "int4": "weight_scale",
    "nvfp4": "weight_scale",
    "gptq": "scales",
    "int8-offset": "weight_scale",
}


@pytest.mark.parametrize("form", SCALES)
def test_scales_that_were_not_applied_are_named_in_every_format(form: str, case: Callable[[str], Case]) -> None:
    made = case(form)
    found = made.judged({QUERY: misread(made, SCALES[form], 127 if form == "bnb-int8" else None)})
    assert says(found, QUERY, "is ΔW added to the codes of the base's")
    assert says(found, QUERY, "its scales were not applied")


def test_codes_with_zero_points_that_were_taken_for_numbers_are_named(case: Callable[[str], Case]) -> None:
    made = case("int8-offset")
    found = made.judged({KEY: made.stored[KEY].to(BF16)})
    assert says(found, KEY, "neither its scales nor its zero points were applied")


@pytest.mark.parametrize("form", ["int8-channel", "fp8-channel"])
def test_a_merge_into_weights_that_a_loader_rounded_is_no_other_in_float32(
    form: str, case: Callable[[str], Case]
) -> None:
    made = case(form)
    merged = made.values[QUERY].to(BF16).double() + made.change
    found = made.judged({QUERY: merged.float(), KEY: made.values[KEY].to(BF16).float()})
    assert {each.code for each in found} == {"LT604"}, found


@pytest.mark.parametrize("form", ["fp8-channel", "int8-channel", "bnb-int8"])
def test_scales_that_another_tool_chose_anew_are_right(form: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    made = case(form)
    right = saved_tensors(merge_with_ours(made.base, made.adapter, tmp_path / "again", "float32", store="as-base"))
    merged = (made.values[QUERY].double() + made.change).float()
    anew, _ = FORMS[form][0](QUERY.removesuffix(".weight"), merged)
    scale = next(name for name in anew if name.endswith(("SCB", "weight_scale")))
    assert (anew[scale].float() < made.stored[scale].float()).any()
    assert not made.judged({name: anew[name] for name in (QUERY, scale)}, config=made.base, over=right)


def test_a_base_that_was_quantised_again_is_not_another(case: Callable[[str], Case], tmp_path: Path) -> None:
    made = case("fp8-channel")
    right = saved_tensors(merge_with_ours(made.base, made.adapter, tmp_path / "again", "float32", store="as-base"))
    kept = [
        name for name in made.values if torch.equal(right[name].view(torch.uint8), made.stored[name].view(torch.uint8))
    ]
    codes = {name: (right[name].float() / 2).to(right[name].dtype) for name in kept}
    scales = {f"{name}_scale": right[f"{name}_scale"] * 2 for name in kept}
    found = made.judged(codes | scales, config=made.base, over=right)
    assert {each.code for each in found} == {"LT605"}
    assert {each.subject for each in found} == {*codes, *scales}
    assert all("the adapter leaves alone: it was quantised again" in each.message for each in found)

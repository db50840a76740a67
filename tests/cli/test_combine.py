"""`lora-tool combine`, `resize` and the check of what they wrote, as they are typed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from lora_tool.adapters.weighted import weighted
from lora_tool.checkpoints import open_adapter
from lora_tool.core.errors import WrongValue
from tests.cli.calling import Caller

ADAPTER, REWARD = "fixtures/causal-llama/adapter", "fixtures/reward-qwen2/adapter"


def test_a_sum_is_written_told_and_verified(call: Caller, tmp_path: Path) -> None:
    half = tmp_path / "half"
    called = call("combine", f"{ADAPTER}=0.5", "-o", half)
    assert called.code == 0
    assert "combining 0.5·fixtures/causal-llama/adapter" in called.out
    assert "exact: rank 4 = 4" in called.out
    assert f"next: lora-tool merge {half}" in called.out
    recorded = json.loads((half / "lora_tool.json").read_text())
    assert recorded["operation"] == "combine"
    assert recorded["inputs"]["adapter"]["weight"] == 0.5
    verified = call("verify", half)
    assert verified.code == 0
    assert "computed match their inputs" in verified.out


def test_what_is_lost_is_known_before_anything_is_written(call: Caller, tmp_path: Path) -> None:
    small = tmp_path / "small"
    planned = call("resize", ADAPTER, "--rank", "2", "-o", small, "--dry-run", "--json").json
    assert not small.exists()
    written = call("resize", ADAPTER, "--rank", "2", "-o", small, "--json").json
    assert planned["modules"] == written["modules"]
    assert {module["rank"] for module in written["modules"]} == {2}
    assert all(0 < module["kept"] <= 1 and module["rank_for_99_percent"] >= 1 for module in written["modules"])
    assert call("validate", small).code == 0
    assert call("merge", small, "--base", "fixtures/causal-llama/base", "-o", tmp_path / "merged").code == 0


BASE = "fixtures/causal-llama/base"


@pytest.mark.parametrize(
    ("typed", "hashed"),
    [
        (("resize", ADAPTER, "--rank", "2"), {"adapter": ADAPTER}),
        (("combine", f"{ADAPTER}=0.5"), {"adapter": ADAPTER}),
        (("prepare", ADAPTER, "--for", "vllm"), {"adapter": ADAPTER}),
        (("convert", ADAPTER, "--to", "peft"), {"adapter": ADAPTER}),
        (("merge", ADAPTER, "--base", BASE), {"adapter": ADAPTER}),
        (("extract", "MERGED", "--base", BASE, "--rank", "2"), {"model": "MERGED", "base": BASE}),
        (("merge", ADAPTER, "--base", BASE, "--hash-base"), {"adapter": ADAPTER, "base": BASE}),
        (("consolidate", "fixtures/zero/stage3-reward"), {"checkpoint": "fixtures/zero/stage3-reward"}),
        (("consolidate", "fixtures/fsdp2-reward"), {"checkpoint": "fixtures/fsdp2-reward"}),
    ],
)
def test_inputs_are_recorded_by_their_hashes(
    call: Caller, tmp_path: Path, typed: tuple[str, ...], hashed: dict[str, str]
) -> None:
    merged, out = tmp_path / "merged", tmp_path / "out"
    if "MERGED" in typed:
        assert call("merge", ADAPTER, "--base", BASE, "-o", merged).code == 0
    called = call(*(str(merged) if word == "MERGED" else word for word in typed), "-o", out, "--json")
    assert called.code == 0, called.err
    recorded = json.loads((out / "lora_tool.json").read_text())
    for name, folder in hashed.items():
        files = recorded["inputs"][name].get("weights") or recorded["inputs"][name]["files"]
        assert files
        for file in files:
            content = ((merged if folder == "MERGED" else Path(folder)) / file["name"]).read_bytes()
            assert file["sha256"] == hashlib.sha256(content).hexdigest()
            assert file["sha256"] in recorded["sha256"].values()
    if recorded.get("modules"):
        assert called.json["kept"] == recorded["kept"]
        assert min(each["kept"] for each in recorded["modules"]) < recorded["kept"] < 1
        assert call("verify", out).code == 0


def test_a_changed_factor_is_found(call: Caller, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert call("resize", ADAPTER, "--keep", "0.8", "-o", kept).code == 0
    weights = kept / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-400:] = bytes(400)
    weights.write_bytes(content)
    called = call("verify", kept)
    assert called.code == 5
    assert "LT626" in called.out
    assert "away from what its inputs give" in called.out


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (("combine", ADAPTER, "-o", "out", "--rank", "2", "--keep", "0.5"), 2, "not both"),
        (("combine", "-o", "out"), 2, "ADAPTER is missing"),
        (("combine", f"{ADAPTER}=0", "-o", "out"), 2, "leaves it out"),
        (("combine", f"{ADAPTER}=nan", "-o", "out"), 2, "is not a usable number"),
        (("combine", ADAPTER, "-o", "out", "--head-of", "nobody"), 2, "not one of the adapters"),
        (("combine", ADAPTER, REWARD, "-o", "out"), 1, "LT512"),
        (("combine", ADAPTER, "nothing-here=0.5", "-o", "out"), 3, "nothing-here"),
        (("combine", ADAPTER, "-o", ADAPTER), 6, "is the input itself"),
        (("combine", "fixtures/causal-llama/base", "-o", "out"), 3, "expected an adapter"),
        (("resize", ADAPTER, "-o", "out"), 2, "either --rank R or --keep SHARE"),
        (("prepare", ADAPTER, "-o", "out"), 2, "--for"),
        (("prepare", ADAPTER, "--for", "vlm", "-o", "out"), 2, "llama.cpp"),
        (("prepare", ADAPTER, "--for", "sglang", "--reward-base", "rm", "-o", "out"), 2, "is only for vLLM"),
        (("prepare", REWARD, "--for", "llama.cpp", "-o", "out"), 3, "`score` saved whole"),
        (
            ("extract", "fixtures/causal-llama/base", "--rank", "4", "-o", "out"),
            3,
            "no file of this model names the base",
        ),
        (("resize", ADAPTER, "-o", "out", "--keep", "0"), 2, "0<x<=1"),
    ],
)
def test_a_wrong_command_is_refused(typed: tuple[str, ...], code: int, said: str, call: Caller) -> None:
    called = call(*typed)
    assert called.code == code
    assert said in called.err
    assert not Path("out").exists()


def test_what_models_are_asked_is_not_asked_of_an_adapter(call: Caller, tmp_path: Path) -> None:
    assert call("combine", ADAPTER, "-o", tmp_path / "same").code == 0
    assert call("verify", tmp_path / "same", "--logits").code == 2


def test_an_equals_sign_in_a_path_is_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ADAPTER, tmp_path / "lr=0.5")
    monkeypatch.chdir(tmp_path)
    assert weighted("lr=0.5") == ("lr=0.5", 1.0)
    assert weighted("lr=0.5=0.25") == ("lr=0.5", 0.25)
    assert weighted("step=last") == ("step=last", 1.0)
    assert weighted("hf://owner/name@main=-2") == ("hf://owner/name@main", -2.0)
    assert weighted(Path("lr=0.5")) == (Path("lr=0.5"), 1.0)
    opened = open_adapter("lr=0.5")
    assert weighted(opened) == (opened, 1.0)
    Path("lr").mkdir()
    with pytest.raises(WrongValue, match="is ambiguous: it is a folder, and also the folder"):
        weighted("lr=0.5")
    assert weighted("lr/=0.5") == ("lr/", 0.5)


def test_an_adapter_is_prepared_for_each_server(call: Caller, tmp_path: Path) -> None:
    for server, following in {
        "vllm": "--max-lora-rank 8",
        "sglang": "sglang.launch_server",
        "llama.cpp": "adapter.gguf",
        "mlx": "mlx_lm.generate",
        "peft": "lora-tool merge",
    }.items():
        called = call("prepare", ADAPTER, "--for", server, "-o", tmp_path / server)
        assert called.code == 0
        assert following in called.out.splitlines()[-1]
        assert call("prepare", ADAPTER, "--for", server, "-o", tmp_path / "never", "--dry-run").code == 0
    assert not (tmp_path / "never").exists()
    assert (tmp_path / "mlx" / "adapters.safetensors").is_file()


def test_what_a_merged_model_changed_comes_back_as_an_adapter(call: Caller, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    assert call("merge", "--rm", REWARD, "-o", model).code == 0
    options = ("--base", "fixtures/reward-qwen2/base", "--rank", "4", "-o", out)
    planned = call("extract", model, *options, "--dry-run", "--json").json
    assert not out.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "what was computed is gone"
    written = call("extract", model, *options, "--json").json
    assert written["modules"] == planned["modules"]
    assert all(module["residual"] >= 0 and module["rounding_noise"] > 0 for module in written["modules"])
    assert call("verify", out).code == 0
    assert call("validate", out, "--base", "fixtures/reward-qwen2/base").code == 0

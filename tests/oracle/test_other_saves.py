"""LoRA that programs save in other places and under other names than PEFT: the adapter is what PEFT itself saves of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lora_tool.checkpoints import open_adapter, open_checkpoint, open_model, open_sharded
from lora_tool.checkpoints.states.dcp_state import flat_shapes
from lora_tool.core.errors import FindingsFound, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.convert.plan_convert import plan_convert
from lora_tool.verification.validating import validate
from tests.cli.calling import FIXTURES
from tests.judging import codes, judge
from tests.oracle.peft_merge import merge_with_ours, randomise, saved_tensors
from tests.oracle.tiny import tiny_model

WEIGHTS = "adapter_model.safetensors"
LORA: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
State = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `base`, and an adapter `good` as PEFT saves it."""
    root = tmp_path_factory.mktemp("made")
    model = tiny_model("llama", "causal-lm")
    model.save_pretrained(root / "base")
    trained(model).save_pretrained(str(root / "good"))
    return root


def trained(model: torch.nn.Module, adapter: str = "default", seed: int = 7) -> PeftModel:
    """Return the model with an adapter of known values."""
    module = get_peft_model(model, LoraConfig(**LORA), adapter_name=adapter)
    generator = torch.Generator().manual_seed(seed)
    for parameter in (each for each in module.parameters() if each.requires_grad):
        torch.nn.init.normal_(parameter, generator=generator)
    return module


def distributed(folder: Path, state: State) -> Path:
    """Save with torch's own writer of distributed checkpoints."""
    save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def same(found: Path, expected: Path) -> bool:
    one, other = load_file(found / WEIGHTS), load_file(expected / WEIGHTS)
    return one.keys() == other.keys() and all(
        one[name].dtype == tensor.dtype and torch.equal(one[name], tensor) for name, tensor in other.items()
    )


def new_module() -> PeftModel:
    return trained(tiny_model("llama", "causal-lm"))


def bare_factors(made: Path, index: str) -> State:
    """Return names as prime-rl's `MultiLoRALinear` and loralib's layers save them: factors are parameters by themselves,
    and the base's weights have the names that they have without LoRA.
    """
    state = PeftModel.from_pretrained(tiny_model("llama", "causal-lm"), made / "good").state_dict()
    return {
        name.removeprefix("base_model.model.")
        .replace(".base_layer.", ".")
        .replace(".default.weight", index): tensor.clone()
        for name, tensor in state.items()
    }


def optimizer(state: State) -> State:
    return {"state": {name: {"exp_avg": tensor, "step": torch.ones(())} for name, tensor in state.items()}}


def factors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if ".lora_" in name)


def plain(state: State) -> State:
    """Return the names of an adapter that transformers added itself: without PEFT's prefix."""
    return {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}


def flattened(state: State) -> State:
    return {**state, **{f"state.{name}.exp_avg": tensor * 0.5 for name, tensor in state.items() if "lora_" in name}}


def before(state: State, beginning: str) -> State:
    return {beginning + name: tensor for name, tensor in state.items()}


def column_major(state: State) -> State:
    """Return factors whose rows do not lie one after the other, as those that LoRA-GA begins with."""
    return {name: tensor.T.contiguous().T if "lora_" in name else tensor for name, tensor in state.items()}


LAYOUTS: dict[str, Callable[[State], State]] = {
    "with factors that lie transposed": column_major,
    "beside a counter": lambda state: {"policy": state, "step": torch.ones(())},
    "beside random states and an optimizer": lambda state: {
        "network": state,
        "rng": {"cpu": torch.ones(4)},
        "opt": optimizer(state),
    },
    "beside flat moments": flattened,
    "beside flat moments, nested": lambda state: {"app": {"model": flattened(state)}},
    "beside averages": lambda state: {**state, "ema": state},
    "added by transformers": lambda state: {"model": plain(state)},
    "added by transformers, under DistributedDataParallel": lambda state: {"model": before(plain(state), "module.")},
    "added by transformers, in a module": lambda state: {"state_dict": before(plain(state), "net.")},
    "of a LoraModel": lambda state: {"model": before(plain(state), "model.")},
    "in two modules": lambda state: {"model": before(state, "actor.policy.")},
    "of a PeftModel around another": lambda state: {"model": before(state, "base_model.model.")},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_and_places(layout: str, made: Path, tmp_path: Path) -> None:
    state = new_module().state_dict()
    folder = distributed(tmp_path / "run", LAYOUTS[layout](state))
    out = execute(plan_consolidate(folder, lora_alpha=6), tmp_path / "out")
    assert same(out, made / "good")
    written = json.loads((out / "adapter_config.json").read_text())
    assert (written["target_modules"], written.get("modules_to_save")) == (["down_proj", "q_proj"], None)


def test_the_optimizer_in_a_folder_beside(made: Path, tmp_path: Path) -> None:
    state = new_module().state_dict()
    distributed(tmp_path / "run" / "model", state)
    distributed(tmp_path / "run" / "optim", optimizer(state))
    out = execute(plan_consolidate(tmp_path / "run", lora_alpha=6), tmp_path / "out")
    assert same(out, made / "good")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(NotACheckpoint, match=r"run holds no weights, but .*: optim\Z"):
        plan_consolidate(tmp_path / "run")


@pytest.mark.parametrize(("model_type", "warned"), [("qwen2", True), ("llama", False)])
def test_biases_of_which_nothing_says_whether_they_were_trained(model_type: str, warned: bool, tmp_path: Path) -> None:
    module = get_peft_model(tiny_model(model_type, "causal-lm"), LoraConfig(**LORA, bias="all"))
    folder = distributed(tmp_path / "run", {"model": module.state_dict()})
    found = [warning for warning in plan_consolidate(folder, lora_alpha=6).warnings if "trained biases" in warning]
    assert len(found) == warned
    for trained, expected in ((module.named_parameters(), "all"), (factors_of(module), "none")):
        distributed(tmp_path / expected / "pytorch_model_fsdp_0", {"model": module.state_dict()})
        states = optimizer({name: torch.ones(1) for name, parameter in trained if parameter.requires_grad})
        distributed(tmp_path / expected / "optimizer_0", {"optimizer": states})
        plan = plan_consolidate(tmp_path / expected, lora_alpha=6)
        config = json.loads(next(file.content for file in plan.side_files if file.content))
        assert config.get("bias", "none") == (expected if warned else "none")
        assert not [warning for warning in plan.warnings if "trained biases" in warning]
    module.peft_config["default"].save_pretrained(str(tmp_path / "config"))
    plan = plan_consolidate(folder, adapter_config=tmp_path / "config")
    assert not plan.warnings
    assert any(step.out.name.endswith("q_proj.base_layer.bias") for step in plan.steps) == warned


def test_a_module_that_is_one_object_is_refused_by_name(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save({"model": new_module().state_dict()}, checkpoint_id=str(tmp_path), no_dist=True, planner=planner)
    with pytest.raises(UnsupportedCheckpoint, match=r"holds only pickled objects: model\n"):
        plan_consolidate(tmp_path)


def test_a_whole_model_in_a_module(made: Path, tmp_path: Path) -> None:
    state = tiny_model("llama", "causal-lm").state_dict()
    for name, beginning in (("lightning", "model."), ("net", "module.net.")):
        folder = distributed(tmp_path / name, {"state_dict": before(state, beginning)})
        shutil.copy(made / "base" / "config.json", tmp_path)
        out = execute(plan_consolidate(folder), tmp_path / f"{name}-out")
        assert load_file(out / "model.safetensors").keys() == state.keys()


def test_a_model_that_lies_in_one_module_of_its_own_keeps_its_names(tmp_path: Path) -> None:
    """Qwen2.5-Omni without its voice has everything, its output layer too, in `thinker`."""
    state = {f"thinker.{name}.weight": torch.ones(2, 2) for name in ("model.norm", "lm_head", "visual.proj")}
    plan = plan_consolidate(distributed(tmp_path / "run", {"model": state}))
    assert {step.out.name for step in plan.steps} == state.keys()


@pytest.mark.parametrize("index", ["", ".0"])
def test_factors_that_are_parameters_by_themselves(index: str, made: Path, tmp_path: Path) -> None:
    state = bare_factors(made, index)
    folder = distributed(tmp_path / "run", {"app": {"model": state, "optimizers": optimizer(state)}})
    plan = plan_consolidate(folder, lora_alpha=6)
    out = execute(plan, tmp_path / "out")
    assert same(out, made / "good")
    assert {record.action for record in plan.leftovers} == {"dropped"}
    assert validate(open_checkpoint(folder)).at_least(Severity.WARNING) == ()
    # the same names in an adapter's file
    beside = Path(shutil.copytree(made / "good", tmp_path / "adapter"))
    save_file({name: tensor for name, tensor in state.items() if "lora_" in name}, beside / WEIGHTS)
    assert codes(judge(beside)) == {"LT211"}
    plan = plan_convert(open_adapter(beside), to="peft", base=None)
    assert same(execute(plan, tmp_path / "converted"), made / "good")


def test_half_of_a_pair_is_refused(made: Path, tmp_path: Path) -> None:
    """PEFT would load it and say nothing more than a warning."""
    state = new_module().state_dict()
    lost = next(name for name in state if "lora_B" in name)
    folder = distributed(tmp_path / "run", {"model": {name: state[name] for name in state if name != lost}})
    (finding,) = validate(open_checkpoint(folder)).at_least(Severity.ERROR)
    assert (finding.code, finding.subject) == ("LT201", lost.replace("lora_B", "lora_A"))
    with pytest.raises(FindingsFound, match=r"LT201 .*lora_A\.default\.weight`: its lora_B is missing"):
        plan_consolidate(folder, adapter_config=made / "good")
    plan = plan_consolidate(folder, adapter_config=made / "good", ignore=["LT201"])
    assert [finding.code for finding in plan.findings] == ["LT201"]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of four ranks, of which this process is the first."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "rows", "why"),
    [
        (
            [_StridedShard(0, split_factor=3), Shard(0)],
            3,
            r"it is cut in strides of 3, which its mesh \[2, 2\] does not explain",
        ),
        ([Shard(0), Partial()], 6, "it is placed as Partial"),
        ([Replicate(), Shard(0)], 5, r"its placement gives this rank \[6, 4\], but the file holds \[5, 4\]"),
    ],
)
def test_a_placement_that_is_not_understood_is_refused(
    placements: list[Placement], rows: int, why: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    local = torch.ones(rows, 4)
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((12, 4)), stride=(4, 1))
    torch.save({"a.weight": tensor}, tmp_path / "model_world_size_4_rank_0.pt")
    with pytest.raises(UnsupportedCheckpoint, match=rf"`a\.weight` \[12, 4\] cannot be put together: {why}"):
        plan_consolidate(tmp_path, what="state")


@pytest.mark.parametrize(
    ("name", "difference", "found"),
    [("q_proj.lora_A.weight", 1, {"LT407"}), ("q_proj.lora_A.weight", 0, set()), ("gate.tokens_per_expert", 1, set())],
)
def test_what_every_rank_holds_whole(name: str, difference: int, found: set[str], tmp_path: Path) -> None:
    """Without sharding all files are equal: LoRA is one for all ranks, a buffer may count what its own rank has seen."""
    for rank in range(2):
        state = {
            f"base_model.model.{name}": torch.full((2, 4), 1.0 + rank * difference),
            "base_model.model.a.lora_A.weight": torch.ones(1, 1),
        }
        torch.save(state, tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    assert {finding.code for finding in validate(open_sharded(tmp_path), select=["LT40"]).findings} == found


def test_one_of_two_adapters_is_chosen_by_its_config(tmp_path: Path) -> None:
    module = new_module()
    module.add_adapter("ref", LoraConfig(**LORA))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".ref." in name:
                parameter.normal_()
    module.save_pretrained(str(tmp_path / "truth"))
    folder = distributed(tmp_path / "run" / "pytorch_model_fsdp_0", {"model": module.state_dict()})
    with pytest.raises(UnsupportedCheckpoint, match="found 2: default, ref") as refused:
        plan_consolidate(folder, lora_alpha=6)
    assert "adapter_config=FOLDER" in str(refused.value.hint)
    for name, own in (("default", tmp_path / "truth"), ("ref", tmp_path / "truth" / "ref")):
        out = execute(plan_consolidate(folder, adapter_config=own), tmp_path / name)
        assert same(out, own)


def test_the_config_of_an_adapter_with_a_name_lies_in_its_folder(tmp_path: Path) -> None:
    module = trained(tiny_model("llama", "causal-lm"), adapter="policy")
    folder = distributed(tmp_path / "run" / "pytorch_model_fsdp_0", {"model": module.state_dict()})
    module.save_pretrained(str(tmp_path / "run"))
    out = execute(plan_consolidate(folder), tmp_path / "out")
    assert same(out, tmp_path / "run" / "policy")


TRAINED: dict[str, tuple[str, State, bool]] = {
    "a head, its base with a head of that shape": ("qwen2", {}, True),
    "a saved module": ("qwen2", {"modules_to_save": ["score", "norm"]}, False),
    "biases under LoRA": ("qwen2", {"bias": "lora_only"}, False),
    "biases under LoRA that PEFT does not save": ("qwen2", {"bias": "lora_only"}, True),
    "trained tokens": ("qwen2", {"trainable_token_indices": {"embed_tokens": [3, 5]}}, False),
    "a head of two layers": ("roberta", {}, False),
    "every bias beside it": ("roberta", {"bias": "all"}, True),
    "biases of LoRA beside it": ("roberta", {"lora_bias": True}, False),
}
"""The model, what it was trained with, and whether the adapter alone was saved, as accelerate does, or all of the module."""


@pytest.mark.filterwarnings("ignore:.*bias.*:UserWarning")
@pytest.mark.parametrize("name", TRAINED)
def test_nothing_that_was_trained_stays_behind(name: str, tmp_path: Path) -> None:
    """PEFT fails on a saved module in another, so that `modules_to_save` names a head of several layers as one."""
    model_type, options, alone = TRAINED[name]
    base = tiny_model(model_type, "seq-cls", num_labels=3)
    base.save_pretrained(tmp_path / "base")
    targets = ["query", "value"] if model_type == "roberta" else ["q_proj", "v_proj"]
    module = get_peft_model(base, LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS", **options))
    generator = torch.Generator().manual_seed(3)
    for parameter in (each for each in module.parameters() if each.requires_grad):
        torch.nn.init.normal_(parameter, generator=generator)
    module.save_pretrained(str(tmp_path / "truth"))
    folder = distributed(
        tmp_path / "run", {"model": get_peft_model_state_dict(module) if alone else module.state_dict()}
    )
    meta = tmp_path / "lora_train_meta.json"
    meta.write_text(json.dumps({"r": 2, "lora_alpha": 8, "task_type": "SEQ_CLS"}))
    rows = torch.tensor([[5, 7, 9, 2]])
    expected = module.eval()(rows).logits
    truth = load_file(tmp_path / "truth" / WEIGHTS)
    for config in (tmp_path / "truth", meta) if model_type == "roberta" else (tmp_path / "truth",):
        out = execute(plan_consolidate(folder, adapter_config=config), tmp_path / f"of-{config.stem}")
        found = load_file(out / WEIGHTS)
        # of a head's biases PEFT saves every copy
        told = [key for key in truth if ".modules_to_save." not in key and ".original_module." not in key]
        assert all(torch.equal(found[key], truth[key]) for key in told)
        if name.endswith("does not save"):
            return
        loaded = PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), out)
        if "bias" not in options:  # of which PEFT takes one adapter in a model
            again = loaded.load_adapter(out, "again")
            assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])
        assert torch.equal(loaded.eval()(rows).logits, expected), config
        if model_type == "roberta":
            written = json.loads((out / "adapter_config.json").read_text())
            assert set(written["modules_to_save"]) <= {"classifier", "score"}


def _by_zero_to_fp32(run: Path, out: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(run), str(out))


def _by_zero_to_fp32_in_shards(run: Path, out: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(run), str(out), max_shard_size="8KB", safe_serialization=True)


def _by_accelerate(run: Path, out: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(run / "pytorch_model_fsdp_0"), str(out))


UNMERGED: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "zero_to_fp32": ("zero/stage2-reward", _by_zero_to_fp32),
    "zero_to_fp32 in shards": ("zero/stage3-reward", _by_zero_to_fp32_in_shards),
    "accelerate merge-weights": ("fsdp2-reward", _by_accelerate),
}


@pytest.mark.parametrize("program", UNMERGED)
def test_a_peft_model_that_was_saved_as_a_model(program: str, tmp_path: Path) -> None:
    """What DeepSpeed's script and accelerate's command make of a LoRA run has PEFT's names in a model's files."""
    name, convert = UNMERGED[program]
    convert(FIXTURES / name, tmp_path / "whole")
    (finding,) = (each for each in validate(open_checkpoint(tmp_path / "whole")).findings if each.code == "LT601")
    held = len(open_model(tmp_path / "whole").tensors)
    assert f"as are those of {held - 1} more tensors" in finding.message
    assert str(finding.hint).endswith(f"lora-tool consolidate {tmp_path / 'whole'}")
    config = FIXTURES / name
    expected = execute(plan_consolidate(open_sharded(FIXTURES / name)), tmp_path / "expected")
    out = execute(plan_consolidate(tmp_path / "whole", adapter_config=config), tmp_path / "out")
    one, other = load_file(out / WEIGHTS), load_file(expected / WEIGHTS)
    assert one.keys() == other.keys()  # zero_to_fp32 writes frozen heads in float32
    assert all(torch.equal(one[name].float(), tensor.float()) for name, tensor in other.items())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model.safetensors", "model_1.safetensors"),
        ("pytorch_model.bin", "pytorch_model_1.bin"),
        ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"),
        ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_1_rank0.bin"),
    ],
)
def test_of_two_models_in_one_save_one_is_chosen(first: str, second: str, made: Path, tmp_path: Path) -> None:
    """As accelerate 1.15's `save_state` calls them (`save_accelerator_state`, `save_fsdp_model`)."""
    modules = [trained(tiny_model("llama", "causal-lm"), seed=seed) for seed in (1, 2)]
    (tmp_path / "save").mkdir()
    for name, module in zip((first, second), modules, strict=True):
        write = save_file if name.endswith(".safetensors") else torch.save
        write({key: tensor.clone() for key, tensor in module.state_dict().items()}, tmp_path / "save" / name)
    names = [
        name.removesuffix("_rank0.bin").removesuffix(".bin").removesuffix(".safetensors") for name in (first, second)
    ]
    names[0] = "model" if names[0] == "pytorch_model" else names[0]
    with pytest.raises(NotACheckpoint, match=f"holds the states of 2 models: {names[0]}, {names[1]}") as refused:
        plan_consolidate(tmp_path / "save", adapter_config=made / "good")
    assert refused.value.hint == f'choose: `tag="{names[1]}"`'
    for name, module in zip(names, modules, strict=True):
        out = execute(plan_consolidate(tmp_path / "save", adapter_config=made / "good", tag=name), tmp_path / name)
        expected = get_peft_model_state_dict(module)
        found = load_file(out / WEIGHTS)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    if "fsdp" not in first:
        (finding,) = (each for each in validate(tmp_path / "save").findings if each.code == "LT114")
        assert Path(finding.path).name == second
        assert finding.hint == f"lora-tool consolidate {tmp_path / 'save'} --tag {names[1]}"


@pytest.mark.parametrize("saved", [None, ["multi_modal_projector"]])
@pytest.mark.filterwarnings("ignore")
def test_a_part_of_a_model_that_peft_was_put_around(saved: list[str] | None, tmp_path: Path) -> None:
    """As InternVL's own training has it: the language model with LoRA, and the projector unfrozen beside it."""
    model = tiny_model("llava", "image-text-to-text")
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    whole: Any = model
    whole.model.language_model = get_peft_model(
        whole.model.language_model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"])
    )
    randomise(whole.model.language_model)
    with torch.no_grad():
        whole.model.multi_modal_projector.linear_1.bias.add_(1)
    model.save_pretrained(tmp_path / "saved")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": saved}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    made = plan_consolidate(tmp_path / "saved", adapter_config=tmp_path)
    assert any("multi_modal_projector" in warning for warning in made.warnings) is (saved is None)
    adapter = execute(made, tmp_path / "adapter")
    out = saved_tensors(merge_with_ours(tmp_path / "base", adapter, tmp_path / "out", "float32"))
    whole.model.language_model = whole.model.language_model.merge_and_unload()
    if saved is None:
        model.load_state_dict({name: base[name] for name in base if "projector" in name}, strict=False)
    model.save_pretrained(tmp_path / "right")
    right = saved_tensors(tmp_path / "right")
    assert out.keys() == right.keys()
    assert all(torch.allclose(out[name], tensor, atol=1e-6) for name, tensor in right.items())


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_shapes_of_flat_slices_follow_from_the_numbers_of_elements() -> None:
    """FSDP1's local state has no shapes: those of DoRA's magnitudes, of biases and of trained tokens are known too."""
    for options in ({"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": [1, 4]}):
        module = get_peft_model(tiny_model("llama", "causal-lm"), LoraConfig(**LORA, **options))
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        hidden = module.config.hidden_size
        found = flat_shapes({name: math.prod(shape) for name, shape in shapes.items()}, hidden=hidden)
        trained = {name for name in shapes if ".lora_" in name or "trainable_tokens" in name}
        assert {name: found.get(name) for name in trained} == {name: shapes[name] for name in trained}
        assert all(shapes[name] == shape for name, shape in found.items())

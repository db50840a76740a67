"""What servers refuse: what is said beyond the code, and adapters that they take."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from lora_tool import prepare, validate, verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.core.report import Severity
from lora_tool.formats.model_config import read_model_config
from lora_tool.plans.algebra.plan_prepare import plan_prepare
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.serving.forms import FORMS, form_of
from lora_tool.rules.serving.lt8_scores import serving_rewards
from lora_tool.rules.serving.named import server_named
from lora_tool.rules.serving.tables import record_of, table_of
from lora_tool.rules.serving.together import path_with
from lora_tool.workflows.written import Written
from tests import checkpoint_edits as edit
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, MERGED, REWARD, copy_of
from tests.mutations.served import plain

SERVERS = ["peft", "vllm", "sglang", "llama.cpp"]


@pytest.mark.parametrize("server", SERVERS)
def test_a_plain_adapter_is_taken_by_all(server: str, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    assert lines(judge(folder, servers=[server])) == []


def test_nothing_is_said_about_serving_unless_asked() -> None:
    report = judge(FIXTURES / REWARD)
    assert not any(code.startswith("LT8") for code in codes(report, Severity.INFO))
    assert not any(skipped.code.startswith("LT8") for skipped in report.skipped)
    assert not any(code.startswith("LT8") for code in report.subjects[0].rules)


def test_a_reward_adapter_must_be_merged_and_the_command_is_right(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "my adapter"))
    (finding,) = judge(folder, servers=["sglang"]).findings
    assert finding.code == "LT801"
    command = shlex.split(str(finding.hint).partition(": ")[2])
    assert command == ["lora-tool", "merge", "--rm", str(folder)]


def test_two_servers_are_judged_at_once() -> None:
    report = judge(FIXTURES / REWARD, servers=["vllm", "sglang"])
    messages = [finding.message for finding in report.at_least(Severity.WARNING)]
    assert [message.split()[0] for message in messages] == ["vLLM", "SGLang"]


@pytest.mark.parametrize(
    ("config", "servers"),
    [
        ({}, ["vllm", "sglang", "peft"]),
        ({"problem_type": "regression"}, []),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ["sglang", "peft"]),
        ({"id2label": {"0": "A", "1": "B"}, "label2id": {"A": 0, "B": 1}}, []),
        ({"architectures": ["Qwen2ForCausalLM"]}, []),
    ],
)
def test_what_servers_make_of_a_reward_is_said_where_they_do_it(
    config: dict[str, object], servers: list[str], tmp_path: Path
) -> None:
    folder = copy_of(MERGED, tmp_path)
    with edit.fields(folder, "config.json") as fields:
        fields.update(config)
    for server in SERVERS:
        found = [each for each in judge(folder, servers=[server]).findings if each.code == "LT825"]
        assert bool(found) == (server in servers)
    serving = serving_rewards(folder, read_model_config(folder / "config.json"))
    assert (serving is not None) == ("vllm" in servers)


@pytest.mark.parametrize(("rank", "flag"), [(8, None), (16, None), (17, "32"), (64, "64"), (300, "320"), (512, "512")])
def test_the_flag_for_the_rank_is_named(rank: int, flag: str | None, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    with edit.tensors(folder) as table:
        for name, tensor in table.items():
            at = 0 if ".lora_A." in name else 1
            table[name] = edit.raw(*(rank if index == at else side for index, side in enumerate(tensor.shape)))
    with edit.fields(folder) as config:
        config["r"] = rank
    found = [finding for finding in judge(folder, servers=["vllm"]).findings if finding.code == "LT803"]
    assert (f"--max-lora-rank {flag} " in str(found[0].hint)) if flag else found == []


def test_lora_outside_of_the_language_model_names_what_vllm_is_started_with(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    with edit.tensors(folder) as table:
        held = {name.replace(".layers.", ".vision_tower.layers."): tensor for name, tensor in table.items()}
        table.clear()
        table.update(held)
    with edit.fields(folder) as config:
        config["rank_pattern"] = {"q_proj": 64}
    (found,) = [finding for finding in judge(folder, servers=["vllm"]).findings if finding.code == "LT803"]
    assert "vllm serve BASE --enable-lora --enable-tower-connector-lora --max-lora-rank 64" in str(found.hint)
    with edit.fields(folder) as config:
        config |= {"rank_pattern": {}, "base_model_name_or_path": "acme/with-a-vision-tower"}
    adapter = open_checkpoint(folder)
    assert isinstance(adapter, AdapterDir)
    written = Written(path=tmp_path / "out", plan=plan_prepare(adapter, Server.VLLM, ignore=("LT8",)), fidelity=None)
    assert " --enable-lora --enable-tower-connector-lora --max-lora-rank " in str(written)


def test_other_modules_than_heads_are_refused_by_vllm(tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    assert codes(judge(folder, servers=["vllm"]), Severity.ERROR) == set()
    with edit.fields(folder) as config:
        config["modules_to_save"].append("lm_head")
    assert codes(judge(folder, servers=["vllm"], select=["LT8"]), Severity.ERROR) == {"LT801"}


def test_a_pattern_of_ranks_alone_is_right_in_llama_cpp(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with edit.fields(folder) as config:
        config |= {"use_rslora": False, "alpha_pattern": {}}
    assert codes(judge(folder, servers=["llama.cpp"])) == set()


IN = "model.layers.0."
MIXTRAL = f"{IN}block_sparse_moe.gate"
PATHS = [
    ("vllm", "mixtral", f"{IN}mlp.gate", MIXTRAL),
    ("vllm", "mixtral", f"{IN}mlp.experts.1.w1", f"{IN}block_sparse_moe.experts.1.w1"),
    ("vllm", "mixtral", MIXTRAL, MIXTRAL),
    ("vllm", "minimax_m2", f"{IN}mlp.gate", MIXTRAL),
    ("vllm", "phimoe", f"{IN}mlp.router", MIXTRAL),
    ("vllm", "granitemoehybrid", f"{IN}block_sparse_moe.router", MIXTRAL),
    ("vllm", "granitemoe", f"{IN}block_sparse_moe.router.layer", MIXTRAL),
    ("vllm", "afmoe", f"{IN}mlp.router.gate", f"{IN}mlp.gate"),
    ("vllm", "hy_v3", f"{IN}mlp.shared_experts.up_proj", f"{IN}mlp.shared_mlp.up_proj"),
    ("vllm", "hy_v3", f"{IN}mlp.gate", f"{IN}mlp.gate"),
    ("vllm", "laguna", f"{IN}mlp.shared_experts.up_proj", f"{IN}mlp.shared_expert.up_proj"),
    ("vllm", "deepseek_v3", f"{IN}mlp.shared_experts.up_proj", f"{IN}mlp.shared_experts.up_proj"),
    ("vllm", "qwen3_moe", f"{IN}mlp.gate", f"{IN}mlp.gate"),
    ("vllm", "nemotron_h", f"{IN}mixer.gate", None),
    ("vllm", "nemotron_h", f"{IN}mixer.up_proj", f"{IN}mixer.up_proj"),
    ("vllm", "deepseek_v3", f"{IN}self_attn.kv_b_proj", None),
    ("vllm", "deepseek_v3", f"{IN}self_attn.q_b_proj", f"{IN}self_attn.q_b_proj"),
    ("vllm", "minicpm3", f"{IN}self_attn.kv_b_proj", f"{IN}self_attn.kv_b_proj"),
    ("mlx", "mixtral", f"{IN}mlp.gate", MIXTRAL),
    ("mlx", "granitemoe", f"{IN}block_sparse_moe.router", f"{IN}block_sparse_moe.router.layer"),
    ("mlx", "granitemoe", f"{IN}block_sparse_moe.router.layer", f"{IN}block_sparse_moe.router.layer"),
    ("llama.cpp", "deepseek_v3", f"{IN}self_attn.q_b_proj", None),
    ("llama.cpp", "deepseek_v3", "lm_head", None),
    ("llama.cpp", "deepseek_v3", f"{IN}self_attn.o_proj", f"{IN}self_attn.o_proj"),
    ("llama.cpp", "deepseek_v4", f"{IN}self_attn.q_b_proj", f"{IN}self_attn.q_b_proj"),
    ("llama.cpp", "kimi_linear", f"{IN}self_attn.o_proj", None),
    ("llama.cpp", "kimi_linear", f"{IN}mlp.gate", f"{IN}mlp.gate"),
    ("llama.cpp", "llama", f"{IN}self_attn.q_proj", f"{IN}self_attn.q_proj"),
    ("llama.cpp", "gpt2", "transformer.wpe", None),
    ("sglang", "mixtral", f"{IN}mlp.gate", f"{IN}mlp.gate"),
]
"""Server, model type, module in transformers 5, the server's name for it; None where it applies no LoRA to it."""


@pytest.mark.parametrize(("server", "model_type", "module", "there"), PATHS)
def test_a_server_has_its_own_names_of_modules(server: str, model_type: str, module: str, there: str | None) -> None:
    assert path_with(module, FORMS[Server(server)].names((model_type,))) == there


IGNORED = ["LT318", "LT510"]  # of bases whose modules have other names


def renamed_modules(folder: Path, old: str, new: str, model_type: str) -> Path:
    """Make one module's name in the adapter and its base another, and the base a model of that type."""
    base = folder.parent / "base"
    edit.renamed(folder, lambda name: name.replace(old, new))
    edit.renamed_in_model(base, old, new)
    leaves = [name.strip(".").rpartition(".")[2] for name in (old, new)]
    with edit.fields(base, "config.json") as config, edit.fields(folder) as own:
        config["model_type"] = model_type
        own["target_modules"] = [leaves[1] if name == leaves[0] else name for name in own["target_modules"]]
        own["base_model_name_or_path"] = str(base)
    return base


@pytest.mark.parametrize("given", [True, False])  # the base that the config names is enough
def test_vllm_gets_a_router_under_its_own_name(given: bool, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    base = renamed_modules(folder, ".self_attn.q_proj.", ".mlp.gate.", "mixtral")
    (found,) = judge(folder, base=base, servers=["vllm"], select=("LT820",)).findings
    assert "block_sparse_moe.gate" in found.message
    assert "--for vllm --base" in str(found.hint)
    out = prepare(folder, "vllm", base=base if given else None, out=tmp_path / "out", ignore=IGNORED).path
    modules = {name.partition(".lora_")[0].partition(".layers.")[2] for name in edit.read(out / edit.WEIGHTS)}
    assert "0.block_sparse_moe.gate" in modules
    assert "0.mlp.gate" not in modules
    assert "0.self_attn.v_proj" in modules
    assert not judge(out, base=base, servers=["vllm"], select=("LT8",)).findings
    assert not verify(out).report.findings


def test_vllm_gets_lora_of_zeros_on_the_other_matrices_of_experts(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    base = renamed_modules(folder, ".mlp.", ".mlp.experts.0.", "qwen3_moe")
    (found,) = judge(folder, base=base, servers=["vllm"], select=("LT814",)).findings
    assert "`model.layers.0.mlp.experts.0.gate_proj`" in found.message
    with pytest.raises(UnsupportedAdapter, match="only some matrices of a layer's experts"):
        plan_prepare(folder, "vllm", ignore=IGNORED)
    out = prepare(folder, "vllm", base=base, out=tmp_path / "out", ignore=IGNORED).path
    table = edit.read(out / edit.WEIGHTS)
    zeros = [name for name in table if "lora_B" in name and not any(table[name].data)]
    assert {name.rpartition(".lora_B")[0][-9:] for name in zeros} == {"gate_proj", "0.up_proj"}
    assert not judge(out, base=base, servers=["vllm"], select=("LT8", "LT219")).findings
    assert not verify(out).report.findings


@pytest.mark.parametrize(
    ("model_type", "class_name", "modules", "expected"),
    [
        ("gpt_oss", "GptOssForCausalLM", ["experts"], {"LT814"}),  # vLLM stops with an AssertionError
        ("gpt_oss", "GptOssForCausalLM", ["experts.base_layer", "experts"], set()),
        ("qwen3_moe", "Qwen3MoeForCausalLM", ["gate"], set()),
        ("mixtral", "MixtralForCausalLM", ["gate"], {"LT820"}),
    ],
)
def test_vllm_and_lora_on_parameters_of_a_known_class(
    model_type: str, class_name: str, modules: list[str], expected: set[str], tmp_path: Path
) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    fused = modules[-1] == "experts"
    with edit.tensors(folder) as table, edit.fields(folder) as config:
        for module in modules:
            table.update(edit.lora(f"{IN}mlp.{module}", rows=16, columns=16, rank=(1 + fused) * config["r"]))
        both = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        config["target_parameters"] = both[-len(modules) :] if fused else ["mlp.gate.weight"]
    base = folder.parent / "base"
    with edit.fields(base, "config.json") as config:
        config |= {"model_type": model_type, "architectures": [class_name]}
    assert codes(judge(folder, base=base, servers=["vllm"], select=("LT809", "LT814", "LT820"))) == expected


def test_llama_cpp_gets_no_lora_that_it_does_not_apply(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    base = renamed_modules(folder, ".self_attn.q_proj.", ".self_attn.q_a_proj.", "deepseek_v3")
    with pytest.raises(UnsupportedAdapter, match="does not apply in a deepseek_v3 model") as refused:
        plan_prepare(folder, "llama.cpp", base=base, ignore=IGNORED)
    assert "lora-tool merge" in str(refused.value.hint)


@pytest.mark.parametrize("config", [None, '{"model_type": "llama", "text_config": {"model_type": []}}', "{}", "[]"])
def test_a_base_without_a_usable_config_is_no_crash(config: str | None, tmp_path: Path) -> None:
    base = Path(shutil.copytree(FIXTURES / "causal-llama" / "base", tmp_path / "base"))
    (base / "config.json").unlink()
    if config is not None:
        (base / "config.json").write_text(config)
    adapter = FIXTURES / "causal-llama" / "adapter"
    assert validate(adapter, base=base, servers=list(Server)).subjects


@pytest.mark.parametrize(
    ("ending", "servers", "severity"),
    [
        (".weight", ["vllm"], Severity.INFO),
        (".weight", ["vllm", "peft"], Severity.ERROR),
        (".weight", ["sglang"], Severity.ERROR),
        ("", ["vllm"], Severity.ERROR),
    ],
)
def test_names_without_pefts_prefix_are_an_error_where_they_are_not_read(
    ending: str, servers: list[str], severity: Severity, tmp_path: Path
) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    edit.renamed(folder, lambda name: name.removeprefix(edit.PREFIX).removesuffix(".weight") + ending)
    found = judge(folder, servers=servers).findings
    assert {(each.code, each.severity) for each in found} == {("LT211", severity)}


ENDS = edit.lora("model.embed_tokens", rows=16, columns=304) | edit.lora("lm_head", rows=304, columns=16)
EXPERTS = {
    name: tensor
    for projection, rows, columns in (("gate_proj", 24, 16), ("up_proj", 24, 16), ("down_proj", 16, 24))
    for name, tensor in edit.lora(f"model.layers.0.mlp.experts.0.{projection}", rows=rows, columns=columns).items()
}


@pytest.mark.parametrize(
    ("architecture", "tensors", "found"),
    [
        ("LlamaForCausalLM", ENDS, set()),
        ("Qwen3ForSequenceClassification", ENDS, set()),  # by the class of its language model
        ("Qwen2ForCausalLM", ENDS, {("LT804", Severity.ERROR)}),
        ("MistralForCausalLM", ENDS, {("LT804", Severity.ERROR)}),  # not as Llama, whose class it inherits
        ("Starcoder2ForCausalLM", ENDS, {("LT804", Severity.ERROR)}),  # the embedding, but no output layer
        ("Gemma3ForConditionalGeneration", ENDS, {("LT804", Severity.WARNING)}),  # as a class inside has it
        ("NewForCausalLM", ENDS, {("LT804", Severity.WARNING)}),
        ("GPT2LMHeadModel", {}, {("LT818", Severity.ERROR)}),
        ("GPTJForCausalLM", ENDS, {("LT818", Severity.ERROR)}),
        ("FalconForSequenceClassification", {}, {("LT818", Severity.ERROR)}),
        ("Qwen3MoeForCausalLM", EXPERTS, set()),
        ("GptOssForCausalLM", EXPERTS, {("LT809", Severity.ERROR)}),
        ("NewForCausalLM", EXPERTS, set()),
    ],
)
def test_what_vllm_takes_depends_on_its_class_for_the_base(
    architecture: str, tensors: edit.Tensors, found: set[tuple[str, Severity]], tmp_path: Path
) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    with edit.tensors(folder) as table:
        table.update(tensors)
    with edit.fields(folder) as config:
        config["target_modules"] += ["embed_tokens", "lm_head", "gate_proj", "up_proj", "down_proj"]
    base = Path(shutil.copytree(FIXTURES / "causal-llama" / "base", tmp_path / "of"))
    with edit.fields(base, "config.json") as config:
        config["architectures"] = [architecture]
    report = judge(folder, base=base, servers=["vllm"], select=["LT8"])
    assert {(each.code, each.severity) for each in report.findings} == found
    assert all("lora-tool prepare" not in str(each.hint) for each in report.findings)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("vllm", "vLLM"),
        ("VLLM@0.32", "vLLM 0.32.0"),
        ("vllm@v0.32.0", "vLLM 0.32.0"),
        ("vllm@0.27.4", "vLLM 0.27.1"),
        ("llama.cpp@b99999", "llama.cpp b11549"),
    ],
)
def test_a_version_is_the_nearest_patch_release_below(word: str, name: str) -> None:
    assert form_of(server_named(word)).name == name


@pytest.mark.parametrize(
    "word", ["vllm@", "vllm@0", "vllm@0.31", "vllm@0.27.0", "vllm@1.32", "vllm@latest", "llama.cpp@b1"]
)
def test_a_version_that_is_not_known_is_refused_with_those_that_are(word: str) -> None:
    with pytest.raises(WrongValue, match=re.escape(record_of(word.partition("@")[0])["version"])):
        server_named(word)


def test_an_older_version_is_judged_by_its_own_table(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    plain(folder)
    with edit.fields(folder) as config:
        config["init_lora_weights"] = "olora"
    (new, old) = (judge(folder, servers=[word]).findings for word in ("vllm", "vllm@0.27"))
    assert [each.message.partition(" the ")[0] for each in (*new, *old)] == ["vLLM refuses", "vLLM 0.27.1 ignores"]
    assert "--for vllm@0.27 " in str(old[0].hint)


def test_every_version_of_every_table_can_be_read() -> None:
    for server in Server:
        for each in table_of(server)["versions"]:
            assert form_of(f"{server}@{each['version']}").version == each["version"]


@pytest.mark.parametrize(("server", "found"), [("vllm", set()), ("vllm@0.27", set()), ("sglang", {"LT801"})])
def test_lora_on_a_head_is_taken_by_vllm(server: str, found: set[str], tmp_path: Path) -> None:
    folder = copy_of(REWARD, tmp_path)
    with edit.tensors(folder) as table:
        for name in [name for name in table if "score" in name]:
            del table[name]
        table.update(edit.lora("score", rows=1, columns=16))
    with edit.fields(folder) as config:
        config |= {"modules_to_save": None, "target_modules": [*config["target_modules"], "score"]}
    assert codes(judge(folder, servers=[server], select=["LT801"])) == found

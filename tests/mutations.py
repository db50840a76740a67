"""One small named injury per rule, done to a copy of a good fixture: the proof that each rule sees what it is for.

`MUTATIONS` maps a name, which begins with the code it must give, to the injury and the folder it is done to. Some
codes have more than one: the forms in which a disease is met.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lora_tool.checkpoint import AdapterDir, open_checkpoint, open_model
from lora_tool.execution.engine import execute
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.plan.algebra.plan_combine import plan_resize
from lora_tool.plan.merge.plan_merge import plan_merge
from tests import checkpoint_edits as edit
from tests.checkpoint_edits import CONFIG, INDEX, PREFIX, WEIGHTS, fields, lora, raw, tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"
CAUSAL = "causal-llama/adapter"
REWARD = "reward-qwen2/adapter"
RUN = "reward-run/checkpoint-2"
WHOLE_RUN = "reward-run"
SHARDED = "causal-llama/base"
MODEL = "reward-qwen2/base"

Q_PROJ = f"{PREFIX}model.layers.0.self_attn.q_proj"
DOWN_PROJ = f"{PREFIX}model.layers.0.mlp.down_proj"
SCORE = f"{PREFIX}score.weight"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """An injury to the folder `of` the fixtures, and with which options it is judged."""

    code: str
    of: str
    injure: Callable[[Path], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    with_base: bool = False
    quiet: bool = False
    """The code is expected as information only."""
    verified: bool = False
    """It is a merged model, which `verify` judges."""


MUTATIONS: dict[str, Mutation] = {}


def _breaks(
    name: str, of: str, *, with_base: bool = False, quiet: bool = False, verified: bool = False, **options: object
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(injure: Callable[[Path], None]) -> Callable[[Path], None]:
        code = name.partition(" ")[0]
        MUTATIONS[name] = Mutation(
            code=code, of=of, injure=injure, options=options, with_base=with_base, quiet=quiet, verified=verified
        )
        return injure

    return register


def copy_of(fixture: str, where: Path) -> Path:
    """Copy the fixture that `fixture` (``causal-llama/adapter``) lies in, and return the copy of it.

    ``reward-qwen2/merged`` is made on the spot, from the copies of its base and adapter, ``resized`` from the adapter.
    """
    root, _, folder = fixture.partition("/")
    shutil.copytree(FIXTURES / root, where / root)
    if folder == "resized":
        return execute(plan_resize(where / root / "adapter", rank=3), where / root / folder)
    return merged_in(where / root) if folder == "merged" else where / root / folder


def merged_in(root: Path) -> Path:
    """Merge the adapter in `root` into the base beside it, and return the merged folder."""
    adapter = open_checkpoint(root / "adapter")
    assert isinstance(adapter, AdapterDir)
    return execute(plan_merge(open_model(root / "base"), adapter), root / "merged", overwrite=True)


def break_(folder: Path, name: str) -> None:
    """Injure a copy of the fixture that `MUTATIONS[name].of` names."""
    MUTATIONS[name].injure(folder)


# LT1xx, the files


@_breaks("LT101", CAUSAL)
def _truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


@_breaks("LT102", CAUSAL)
def _pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4632\n")


@_breaks("LT103", CAUSAL)
def _hole(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    del header[f"{Q_PROJ}.lora_B.weight"]
    edit.write_parts(folder / WEIGHTS, header, data)


@_breaks("LT104", CAUSAL)
def _overlap(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    table = sorted((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    for entry in table[1:]:
        entry["data_offsets"] = [at - 8 for at in entry["data_offsets"]]
    edit.write_parts(folder / WEIGHTS, header, data[:-8])


@_breaks("LT105", CAUSAL)
def _duplicate_tensor(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    text = json.dumps(header)
    name = f"{Q_PROJ}.lora_A.weight"
    entry = json.dumps({name: header[name]})[1:-1]
    edit.write_parts(folder / WEIGHTS, text[:-1] + ", " + entry + "}", data)


@_breaks("LT105 in the config", CAUSAL)
def _duplicate_field(folder: Path) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace("{", '{"r": 8,', 1))


@_breaks("LT106", CAUSAL)
def _wrong_size(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    header[f"{Q_PROJ}.lora_A.weight"]["dtype"] = "BF16"
    edit.write_parts(folder / WEIGHTS, header, data)


@_breaks("LT107", SHARDED)
def _shard_missing(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


@_breaks("LT108", SHARDED)
def _shard_outside(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        index["weight_map"]["lm_head.weight"] = "../other/model.safetensors"


@_breaks("LT109", SHARDED)
def _not_in_index(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        del index["weight_map"]["model.norm.weight"]


@_breaks("LT109 in another shard", SHARDED)
def _elsewhere(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"


@_breaks("LT110", CAUSAL)
def _pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00.")


@_breaks("LT110 readable", CAUSAL)
def _torch_file(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


@_breaks("LT111", SHARDED)
def _total_size(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        index["metadata"]["total_size"] = len(index["weight_map"])


@_breaks("LT112", CAUSAL)
def _link_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


@_breaks("LT113", CAUSAL)
def _empty_config(folder: Path) -> None:
    (folder / CONFIG).write_bytes(b"")


@_breaks("LT113 trainer state", RUN)
def _cut_trainer_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text('{"global_step": 2, "log_hist')


@_breaks("LT113 of the base", CAUSAL, with_base=True)
def _cut_generation_config(folder: Path) -> None:
    (folder.parent / "base" / "generation_config.json").write_text('{"eos_token_id": ')


@_breaks("LT318 wrapped", CAUSAL, with_base=True)
def _wrapped_base(folder: Path) -> None:
    base = folder.parent / "base"
    with fields(base, INDEX) as index:
        index["weight_map"] = {f"module.{name}": file for name, file in index["weight_map"].items()}
        files = set(index["weight_map"].values())
    for file in files:
        with tensors(base, file) as table:
            wrapped = {f"module.{name}": tensor for name, tensor in table.items()}
            table.clear()
            table.update(wrapped)


@_breaks("LT114", SHARDED)
def _stray(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00005-of-00005.safetensors")


@_breaks("LT115", CAUSAL)
def _no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


@_breaks("LT113 tokenizer", REWARD)
def _cut_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(text[: len(text) // 2])


@_breaks("LT113 large tokenizer", CAUSAL)
def _cut_large_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": "' + "x" * 2_000_000)


@_breaks("LT113 tokenizer's config", SHARDED)
def _empty_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("")


# LT2xx, the adapter


@_breaks("LT201", CAUSAL)
def _without_b(folder: Path) -> None:
    with tensors(folder) as table:
        del table[f"{Q_PROJ}.lora_B.weight"]


@_breaks("LT201 without A", REWARD)
def _without_a(folder: Path) -> None:
    with tensors(folder) as table:
        del table[f"{Q_PROJ}.lora_A.weight"]


@_breaks("LT201 nothing but its magnitude", CAUSAL)
def _magnitude_alone(folder: Path) -> None:
    _dora(folder)
    with tensors(folder) as table:
        for part in "AB":
            del table[f"{Q_PROJ}.lora_{part}.weight"]


@_breaks("LT202", CAUSAL)
def _ranks_disagree(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = raw(16, 2)


@_breaks("LT202 flat", CAUSAL)
def _flattened(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = raw(64)


def _dora(folder: Path) -> None:
    with fields(folder) as config:
        config["use_dora"] = True
    with tensors(folder) as table:
        lengths = {name: tensor.shape[0] for name, tensor in table.items() if ".lora_B." in name}
        for name, rows in lengths.items():
            table[name.replace(".lora_B.weight", ".lora_magnitude_vector")] = raw(rows)


@_breaks("LT202 magnitude", CAUSAL)
def _magnitude_of_another_length(folder: Path) -> None:
    _dora(folder)
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_magnitude_vector"] = raw(12)


@_breaks("LT202 magnitude as a column", CAUSAL)
def _magnitude_as_a_column(folder: Path) -> None:
    _dora(folder)
    with tensors(folder) as table:
        name = f"{Q_PROJ}.lora_magnitude_vector"
        table[name] = raw(*table[name].shape, 1)


@_breaks("LT203", CAUSAL)
def _other_r(folder: Path) -> None:
    with fields(folder) as config:
        config["r"] = 8


@_breaks("LT203 by pattern", CAUSAL)
def _no_rank_pattern(folder: Path) -> None:
    with fields(folder) as config:
        config["rank_pattern"] = {}


@_breaks("LT204", CAUSAL)
def _swapped(folder: Path) -> None:
    with tensors(folder) as table:
        a, b = f"{DOWN_PROJ}.lora_A.weight", f"{DOWN_PROJ}.lora_B.weight"
        table[a], table[b] = table[b], table[a]


@_breaks("LT204 everywhere", REWARD)
def _swapped_everywhere(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.translate(str.maketrans("AB", "BA")) if ".lora_" in name else name)


@_breaks("LT205", CAUSAL)
def _target_without_tensors(folder: Path) -> None:
    with fields(folder) as config:
        config["target_modules"].append("c_attn")


@_breaks("LT206", CAUSAL)
def _zero_size(folder: Path) -> None:
    with tensors(folder) as table:
        for name in table:
            table[name] = edit.emptied(table[name])


@_breaks("LT206 one pair", CAUSAL)
def _one_zero_size(folder: Path) -> None:
    with tensors(folder) as table:
        for part in "AB":
            name = f"{Q_PROJ}.lora_{part}.weight"
            table[name] = edit.emptied(table[name])


@_breaks("LT206 one factor", CAUSAL)
def _one_zero_factor(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{Q_PROJ}.lora_A.weight"
        table[name] = edit.emptied(table[name])


@_breaks("LT206 with the head", REWARD)
def _zero_size_head(folder: Path) -> None:
    _zero_size(folder)


@_breaks("LT206 in a run", RUN)
def _zero_size_with_tag(folder: Path) -> None:
    _zero_size(folder)
    shutil.copytree(FIXTURES / "zero" / "stage3-reward" / "global_step2", folder / "global_step2")


@_breaks("LT207", CAUSAL)
def _untargeted(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.0.mlp.up_proj", rows=32, columns=16))


@_breaks("LT207 saved", CAUSAL)
def _saved_without_reason(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.mlp.up_proj.weight"] = raw(32, 16)


@_breaks("LT207 bias", CAUSAL)
def _bias_without_reason(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.self_attn.k_proj.bias"] = raw(8)


@_breaks("LT207 tokens", CAUSAL)
def _tokens_without_reason(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(2, 16)


@_breaks("LT207 odd part", CAUSAL)
def _bias_of_lora_a(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.bias"] = raw(4)


@_breaks("LT208", CAUSAL)
def _never_moved(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in table.items():
            if ".lora_B." in name:
                table[name] = raw(*tensor.shape, value=0.0)


def _keep_rows_of(rank: int, folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in table.items():
            if ".lora_B." in name:
                each = -(-tensor.shape[0] // 4)
                columns = len(tensor.data) // tensor.shape[0]
                kept = tensor.data[rank * each * columns : (rank + 1) * each * columns]
                before = bytes(rank * each * columns)
                table[name] = replace(tensor, data=(before + kept).ljust(len(tensor.data), b"\0"))


_breaks("LT227", CAUSAL)(partial(_keep_rows_of, 0))
_breaks("LT227 another rank", REWARD)(partial(_keep_rows_of, 2))


@_breaks("LT208 reward", REWARD)
def _only_the_head_was_trained(folder: Path) -> None:
    _never_moved(folder)


@_breaks("LT311", REWARD)
def _head_of_zeros(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(*table[SCORE].shape, value=0.0)


@_breaks("LT115 shards", CAUSAL)
def _adapter_in_shards(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": {}}')


@_breaks("LT209", CAUSAL)
def _nan(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = raw(4, 16, value=float("nan"))


@_breaks("LT209 in the head", REWARD)
def _infinite_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(1, 16, dtype="BF16", value=float("inf"))


@_breaks("LT219", CAUSAL)
def _constant(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = edit.filled(0.25, 4, 16)


@_breaks("LT219 zero A", REWARD)
def _zero_a(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = edit.filled(0.0, 4, 16)


@_breaks("LT219 B", REWARD)
def _constant_b(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = edit.filled(1.0, 16, 4)


@_breaks("LT220", CAUSAL)
def _exploded(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{Q_PROJ}.lora_B.weight"
        table[name] = edit.scaled(table[name], 2.0**30)


@_breaks("LT220 one bit", REWARD)
def _flipped_bit(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{Q_PROJ}.lora_B.weight"
        data = bytearray(table[name].data)
        data[43] ^= 0x40  # the highest bit of an exponent
        table[name] = edit.Raw("F32", (16, 4), bytes(data))


@_breaks("LT210", CAUSAL)
def _zero_alpha(folder: Path) -> None:
    with fields(folder) as config:
        config["lora_alpha"] = 0


@_breaks("LT210 by pattern", CAUSAL)
def _zero_alpha_pattern(folder: Path) -> None:
    with fields(folder) as config:
        config["alpha_pattern"] = {"q_proj": 0}


@_breaks("LT211", CAUSAL)
def _no_prefix(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.removeprefix(PREFIX))


@_breaks("LT211 reward", REWARD)
def _no_prefix_reward(folder: Path) -> None:
    _no_prefix(folder)


@_breaks("LT211 compiled", CAUSAL)
def _compiled(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."))


@_breaks("LT211 compiled outside", CAUSAL)
def _compiled_outside(folder: Path) -> None:
    edit.renamed(folder, lambda name: f"_orig_mod.{name}")


@_breaks("LT211 DDP", CAUSAL)
def _distributed(folder: Path) -> None:
    edit.renamed(folder, lambda name: f"module.{name}")


@_breaks("LT211 FSDP", CAUSAL)
def _sharded(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module."))


@_breaks("LT211 another name", CAUSAL)
def _named_adapter(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace(".weight", ".policy.weight"))


@_breaks("LT211 two adapters", CAUSAL)
def _two_adapters(folder: Path) -> None:
    with tensors(folder) as table:
        table |= {name.replace(".weight", ".second.weight"): tensor for name, tensor in table.items()}


@_breaks("LT211 raw state beside the saved", CAUSAL)
def _raw_beside_saved(folder: Path) -> None:
    with tensors(folder) as table:
        table |= {name.replace(".weight", ".default.weight"): tensor for name, tensor in table.items()}


@_breaks("LT211 doubled", CAUSAL)
def _doubled(folder: Path) -> None:
    edit.renamed(folder, lambda name: PREFIX + name)


@_breaks("LT212", CAUSAL)
def _integers(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = raw(4, 16, dtype="I8")


@_breaks("LT212 head", REWARD)
def _integer_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(1, 16, dtype="I8")


@_breaks("LT212 norm", CAUSAL)
def _integer_norm(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16, dtype="I64")
    with fields(folder) as config:
        config["modules_to_save"] = ["model.norm"]


@_breaks("LT213", REWARD)
def _original_module(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.original_module.weight"] = table[SCORE]


@_breaks("LT213 both copies", REWARD)
def _raw_state(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.modules_to_save.default.weight"] = table[SCORE]
        table[f"{PREFIX}score.original_module.weight"] = table[SCORE]


@_breaks("LT213 other values", REWARD)
def _another_copy_of_the_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.modules_to_save.default.weight"] = raw(1, 16, dtype="BF16")


@_breaks("LT213 base layers", CAUSAL)
def _base_layers(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.base_layer.weight"] = raw(16, 16)


@_breaks("LT214", CAUSAL)
def _string_r(folder: Path) -> None:
    with fields(folder) as config:
        config["r"] = "4"


@_breaks("LT214 task", REWARD)
def _lower_case_task(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = "seq_cls"


@_breaks("LT214 no model type", SHARDED)
def _no_model_type(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        del config["model_type"]


@_breaks("LT214 no peft_type", CAUSAL)
def _no_peft_type(folder: Path) -> None:
    with fields(folder) as config:
        del config["peft_type"]


@_breaks("LT214 peft_type is null", CAUSAL)
def _null_peft_type(folder: Path) -> None:
    with fields(folder) as config:
        config["peft_type"] = None


@_breaks("LT214 no config", CAUSAL)
def _no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


@_breaks("LT214 model", SHARDED)
def _string_vocabulary(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["vocab_size"] = "304"


@_breaks("LT214 unknown field", CAUSAL, quiet=True)
def _unknown_field(folder: Path) -> None:
    with fields(folder) as config:
        config["from_the_future"] = True


@_breaks("LT215", CAUSAL, quiet=True)
def _corda(folder: Path) -> None:
    with fields(folder) as config:
        config["init_lora_weights"] = "corda"


@_breaks("LT216", CAUSAL)
def _no_tensors(folder: Path) -> None:
    edit.write(folder / WEIGHTS, {})


@_breaks("LT216 head alone", REWARD)
def _head_alone(folder: Path) -> None:
    edit.write(folder / WEIGHTS, {SCORE: edit.read(folder / WEIGHTS)[SCORE]})


@_breaks("LT217", CAUSAL)
def _loha(folder: Path) -> None:
    with fields(folder) as config:
        config["peft_type"] = "LOHA"


@_breaks("LT217 prompt", CAUSAL)
def _prefix_tuning(folder: Path) -> None:
    with fields(folder) as config:
        config["peft_type"] = "PREFIX_TUNING"
    with tensors(folder) as table:
        table.clear()
        table["prompt_embeddings"] = raw(4, 64)


@_breaks("LT218", CAUSAL)
def _dora_without_magnitude(folder: Path) -> None:
    with fields(folder) as config:
        config["use_dora"] = True


@_breaks("LT218 magnitude without DoRA", CAUSAL)
def _magnitude_without_dora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_magnitude_vector"] = raw(16)


@_breaks("LT218 bias without lora_bias", CAUSAL)
def _bias_without_lora_bias(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.bias"] = raw(16)


@_breaks("LT218 lora_bias without bias", CAUSAL)
def _lora_bias_without_bias(folder: Path) -> None:
    with fields(folder) as config:
        config["lora_bias"] = True


@_breaks("LT221", CAUSAL)
def _unsaid_order_of_experts(folder: Path) -> None:
    experts = f"{PREFIX}model.layers.0.mlp.experts"
    with tensors(folder) as table, fields(folder) as config:
        rank = config["r"]
        table |= {f"{experts}.lora_A.weight": raw(4 * rank, 16), f"{experts}.lora_B.weight": raw(24, 4 * rank)}
        config["target_parameters"] = ["mlp.experts.down_proj"]
        config["auto_mapping"] = {"base_model_class": "MixtralForCausalLM", "unsloth_fixed": True}


@_breaks("LT221 no order", CAUSAL)
def _unknown_order_of_experts(folder: Path) -> None:
    with fields(folder) as config:
        config["lora_B_layout"] = "sideways"


@_breaks("LT220 large", REWARD)
def _large(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{Q_PROJ}.lora_B.weight"
        table[name] = edit.scaled(table[name], 2.0**20)


@_breaks("LT220 in the head", REWARD)
def _large_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(1, 16, dtype="BF16", value=1024.0)


@_breaks("LT222", CAUSAL)
def _projector_beside(folder: Path) -> None:
    (folder / "non_lora_trainables.bin").write_bytes(b"PK")


@_breaks("LT222 value head", CAUSAL)
def _value_head_of_trl(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def _trained_tokens(folder: Path, indices: list[int], *, rows: int, width: int = 16) -> None:
    with fields(folder) as config:
        config["trainable_token_indices"] = indices
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(rows, width)


@_breaks("LT226", CAUSAL)
def _fewer_rows_than_tokens(folder: Path) -> None:
    _trained_tokens(folder, [3, 5, 7], rows=2)


@_breaks("LT226 no rows", CAUSAL)
def _rows_lost(folder: Path) -> None:
    with fields(folder) as config:
        config["trainable_token_indices"] = [3]


@_breaks("LT226 twice", CAUSAL)
def _one_token_twice(folder: Path) -> None:
    _trained_tokens(folder, [3, 3], rows=2)


@_breaks("LT226 of another module", CAUSAL)
def _rows_of_another_module(folder: Path) -> None:
    _trained_tokens(folder, [3], rows=1)
    with fields(folder) as config:
        config["trainable_token_indices"] = {"lm_head": [3]}


@_breaks("LT226 whole as well", CAUSAL)
def _trained_whole_and_by_rows(folder: Path) -> None:
    _trained_tokens(folder, [1], rows=1)
    with fields(folder) as config:
        config["modules_to_save"] = ["embed_tokens"]
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(304, 16)


@_breaks("LT226 LoRA as well", CAUSAL)
def _lora_and_trained_rows(folder: Path) -> None:
    _trained_tokens(folder, [1], rows=1)
    _lora_on_embeddings(folder, rows=304)


def _lora_on_embeddings(folder: Path, *, rows: int) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.lora_embedding_A"] = raw(4, rows)
        table[f"{PREFIX}model.embed_tokens.lora_embedding_B"] = raw(16, 4)
    with fields(folder) as config:
        config["target_modules"].append("embed_tokens")


# LT3xx, the head


@_breaks("LT301", REWARD)
def _no_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[SCORE]


@_breaks("LT301 trained without a task type", REWARD, with_base=True)
def _no_head_and_no_task(folder: Path) -> None:
    _no_head(folder)
    with fields(folder) as config:
        config |= {"task_type": None, "modules_to_save": None}
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers",
        }


@_breaks("LT301 in a run", RUN)
def _no_head_in_run(folder: Path) -> None:
    _no_head(folder)


@_breaks("LT301 by class", REWARD)
def _no_head_of_the_class(folder: Path) -> None:
    _no_head(folder)
    with fields(folder) as config:
        config["task_type"] = None
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers.models.qwen2.modeling_qwen2",
        }


@_breaks("LT301 by class with a base", REWARD, with_base=True)
def _no_head_of_the_class_with_base(folder: Path) -> None:
    _no_head_of_the_class(folder)


@_breaks("LT302", REWARD)
def _lora_on_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[SCORE]
        table.update(lora("score", rows=1, columns=16))
    with fields(folder) as config:
        config["modules_to_save"] = None
        config["target_modules"].append("score")


@_breaks("LT302 without a task", REWARD)
def _lora_on_head_no_task(folder: Path) -> None:
    _lora_on_head(folder)
    with fields(folder) as config:
        config["task_type"] = None


@_breaks("LT302 with a base", REWARD, with_base=True)
def _lora_on_head_with_base(folder: Path) -> None:
    _lora_on_head(folder)


@_breaks("LT303", REWARD, num_labels=5)
def _other_number_of_labels(folder: Path) -> None:
    assert folder.is_dir()  # nothing is wrong with the folder but what is asked of it


@_breaks("LT303 reward", REWARD, task="reward")
def _five_rows(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(5, 16, dtype="BF16")


@_breaks("LT303 base", REWARD, with_base=True)
def _base_of_three_labels(folder: Path) -> None:
    edit.as_classifier(folder.parent / "base", labels=3, rows=3)


@_breaks("LT304", REWARD)
def _causal_task(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = "CAUSAL_LM"


@_breaks("LT304 no task", REWARD)
def _no_task(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = None


@_breaks("LT304 asked for", CAUSAL, task="reward")
def _not_a_reward_model(folder: Path) -> None:
    assert folder.is_dir()


@_breaks("LT304 base", CAUSAL, with_base=True)
def _base_of_another_class(folder: Path) -> None:
    with fields(folder.parent / "base", "config.json") as config:
        config["architectures"] = ["LlamaForSequenceClassification"]


@_breaks("LT304 another task", REWARD, task="token-cls")
def _not_a_token_classifier(folder: Path) -> None:
    assert folder.is_dir()


@_breaks("LT306", MODEL)
def _model_without_pad(folder: Path) -> None:
    edit.as_classifier(folder, pad=None)


@_breaks("LT306 tokenizer", REWARD, quiet=True)
def _tokenizer_without_pad(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        del config["pad_token"]


@_breaks("LT307", MODEL)
def _classifier_without_head(folder: Path) -> None:
    edit.as_classifier(folder)
    with tensors(folder, "model.safetensors") as table:
        del table["score.weight"]


@_breaks("LT307 causal with a head", MODEL)
def _causal_with_head(folder: Path) -> None:
    edit.as_classifier(folder)
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForCausalLM"]


@_breaks("LT308", MODEL)
def _default_labels(folder: Path) -> None:
    edit.as_classifier(folder, labels=None)


@_breaks("LT308 three", MODEL)
def _three_labels(folder: Path) -> None:
    edit.as_classifier(folder, labels=3)


@_breaks("LT308 bias", MODEL)
def _bias_of_another_head(folder: Path) -> None:
    edit.as_classifier(folder, labels=3, rows=3)
    with tensors(folder, "model.safetensors") as table:
        table["score.bias"] = raw(2, dtype="BF16")
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForTokenClassification"]


@_breaks("LT308 answers", MODEL)
def _one_row_for_answers(folder: Path) -> None:
    edit.as_classifier(folder)
    with tensors(folder, "model.safetensors") as table:
        table["qa_outputs.weight"] = table.pop("score.weight")
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForQuestionAnswering"]


@_breaks("LT312", MODEL, task="reward")
def _causal_asked_as_reward(folder: Path) -> None:
    assert open_model(folder).config is not None  # as it is: a causal LM


@_breaks("LT312 labels, no class", MODEL, num_labels=3)
def _no_class_asked_as_classifier(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        del config["architectures"]


@_breaks("LT309", MODEL)
def _pad_id_beyond(folder: Path) -> None:
    edit.as_classifier(folder, pad=304)


@_breaks("LT309 causal", MODEL)
def _pad_id_of_a_causal_model(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["pad_token_id"] = 304


@_breaks("LT309 tokenizer", MODEL)
def _pad_token_beyond(folder: Path) -> None:
    _add_pad_token(folder)


@_breaks("LT309 adapter", CAUSAL, with_base=True)
def _pad_token_beyond_the_base(folder: Path) -> None:
    _add_pad_token(folder)


@_breaks("LT309 old tokenizer", REWARD, with_base=True)
def _pad_token_in_the_config(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        config["pad_token"] = {"content": "[PAD]", "special": True}
        config["added_tokens_decoder"] = {"304": {"content": "[PAD]", "special": True}}


def _add_pad_token(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        config["pad_token"] = "[PAD]"
    with fields(folder, "tokenizer.json") as tokenizer:
        tokenizer["added_tokens"].append({"id": 304, "content": "[PAD]", "special": True})


@_breaks("LT310", SHARDED)
def _fewer_layers(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["num_hidden_layers"] = 4


@_breaks("LT310 in the base", CAUSAL, with_base=True)
def _base_with_fewer_layers(folder: Path) -> None:
    _fewer_layers(folder.parent / "base")


@_breaks("LT310 vocabulary", MODEL)
def _other_vocabulary(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["vocab_size"] = 320


# LT5xx, the adapter against its base


@_breaks("LT501", CAUSAL, with_base=True)
def _absent_module(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.0.cross_attn.q_proj", rows=16, columns=16))


@_breaks("LT501 output of a classifier", REWARD, with_base=True)
def _lora_on_the_output_of_a_classifier(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("lm_head", rows=304, columns=16))
    with fields(folder) as config:
        config["target_modules"].append("lm_head")


@_breaks("LT502", CAUSAL, with_base=True)
def _other_width(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = raw(4, 24)


@_breaks("LT502 rows", REWARD, with_base=True)
def _other_height(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = raw(24, 4)


@_breaks("LT502 head", REWARD, with_base=True)
def _head_of_another_width(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(1, 24, dtype="BF16")


@_breaks("LT502 flat head", REWARD, with_base=True)
def _head_of_one_dimension(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(16, dtype="BF16")


@_breaks("LT502 norm", CAUSAL, with_base=True)
def _lora_on_a_vector(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.norm", rows=16, columns=16))
    with fields(folder) as config:
        config["target_modules"].append("model.norm")


@_breaks("LT502 tokens", CAUSAL, with_base=True)
def _tokens_of_another_width(folder: Path) -> None:
    _trained_tokens(folder, [1], rows=1, width=24)


@_breaks("LT503", CAUSAL, with_base=True)
def _layer_beyond(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.7.self_attn.q_proj", rows=16, columns=16))


@_breaks("LT503 of the config", CAUSAL, with_base=True)
def _layer_beyond_the_config(folder: Path) -> None:
    with fields(folder.parent / "base", "config.json") as config:
        config["num_hidden_layers"] = 1


@_breaks("LT504", CAUSAL, with_base=True)
def _smaller_vocabulary(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(290, 16)
    with fields(folder) as config:
        config["modules_to_save"] = ["embed_tokens"]


@_breaks("LT504 under LoRA", CAUSAL, with_base=True)
def _lora_on_another_vocabulary(folder: Path) -> None:
    _lora_on_embeddings(folder, rows=310)


@_breaks("LT504 torn", CAUSAL, with_base=True)
def _ends_of_two_vocabularies(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(310, 16)
        table[f"{PREFIX}lm_head.weight"] = raw(312, 16)
    with fields(folder) as config:
        config["modules_to_save"] = ["embed_tokens", "lm_head"]


@_breaks("LT504 one end", CAUSAL, with_base=True)
def _new_rows_of_one_end(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(310, 16)
    with fields(folder) as config:
        config["modules_to_save"] = ["embed_tokens"]


@_breaks("LT505", CAUSAL, with_base=True)
def _layer_lost(folder: Path) -> None:
    with tensors(folder) as table:
        for name in [name for name in table if "layers.1.mlp.down_proj" in name]:
            del table[name]


@_breaks("LT505 saved in part", CAUSAL, with_base=True)
def _one_norm_lost(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.input_layernorm.weight"] = raw(16)
    with fields(folder) as config:
        config["modules_to_save"] = ["input_layernorm"]


@_breaks("LT506", CAUSAL, with_base=True)
def _saved_of_other_shape(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(12)
    with fields(folder) as config:
        config["modules_to_save"] = ["model.norm"]


@_breaks("LT506 absent", CAUSAL, with_base=True)
def _saved_nowhere(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.mlp.router.weight"] = raw(4, 16)
    with fields(folder) as config:
        config["modules_to_save"] = ["router"]


@_breaks("LT506 bias", CAUSAL, with_base=True)
def _bias_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.bias"] = raw(16)
    with fields(folder) as config:
        config["bias"] = "all"


@_breaks("LT506 output of a classifier", REWARD, with_base=True)
def _output_layer_beside_the_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.weight"] = raw(304, 16, dtype="BF16")
    with fields(folder) as config:
        config["modules_to_save"] = ["score", "lm_head"]


def _record(folder: Path, base: Path) -> None:
    """Write what `lora-tool train` writes beside an adapter that it trained on the model `base`."""
    weights = open_model(base).weights
    table = {
        "schema_version": 1,
        "base": {"hub_id": "some/model", "revision": None, "fingerprint": fingerprint(weights)},
    }
    (folder / "lora_tool_train.json").write_text(json.dumps(table))


@_breaks("LT507", CAUSAL, with_base=True)
def _other_base(folder: Path) -> None:
    base = folder.parent / "base"
    _record(folder, base)
    name = "model-00001-of-00002.safetensors"
    with tensors(base, name) as table:
        first = next(iter(table))
        table[first] = edit.scrambled(table[first])


@_breaks("LT520", CAUSAL, with_base=True)
def _base_that_is_not_named(folder: Path) -> None:
    shutil.copytree(folder.parent / "base", folder.parent / "named")
    with tensors(folder.parent / "base", "model-00001-of-00002.safetensors") as table:
        first = next(iter(table))
        table[first] = edit.scrambled(table[first])
    with fields(folder) as config:
        config["base_model_name_or_path"] = str(folder.parent / "named")


@_breaks("LT521", CAUSAL, quiet=True)
def _base_that_moved(folder: Path) -> None:
    shutil.copytree(folder.parent / "base", folder.parent / "llama")
    with fields(folder) as config:
        config["base_model_name_or_path"] = "/where/it/was/trained/llama"


@_breaks("LT521 windows", CAUSAL, quiet=True)
def _base_that_moved_from_windows(folder: Path) -> None:
    shutil.copytree(folder.parent / "base", folder.parent / "llama")
    with fields(folder) as config:
        config["base_model_name_or_path"] = "C:\\models\\llama"


@_breaks("LT507 unreadable", CAUSAL)
def _no_record(folder: Path) -> None:
    (folder / "lora_tool_train.json").write_text("[]")


@_breaks("LT508", CAUSAL, with_base=True, quiet=True)
def _lora_on_tied_end(folder: Path) -> None:
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        config["tie_word_embeddings"] = True
    with tensors(folder) as table:
        table.update(lora("lm_head", rows=304, columns=16))
    with fields(folder) as config:
        config["target_modules"].append("lm_head")


@_breaks("LT509", CAUSAL, with_base=True)
def _token_beyond_the_vocabulary(folder: Path) -> None:
    _trained_tokens(folder, [304], rows=1)


@_breaks("LT510", CAUSAL, with_base=True)
def _base_of_experts(folder: Path) -> None:
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    for path in base.glob("*.safetensors"):
        held = edit.read(path)
        edit.write(path, {name.replace(".mlp.", ".block_sparse_moe.experts.0."): held[name] for name in held})
    index = base / INDEX
    index.write_text(index.read_text().replace(".mlp.", ".block_sparse_moe.experts.0."))


@_breaks("LT511", CAUSAL, with_base=True)
def _base_that_holds_it(folder: Path) -> None:
    merged = merged_in(folder.parent)
    shutil.rmtree(folder.parent / "base")
    merged.rename(folder.parent / "base")


@_breaks("LT512", CAUSAL, with_base=True, adapters=[open_checkpoint(FIXTURES / CAUSAL)])
def _the_same_twice(folder: Path) -> None:
    assert folder.is_dir()


@_breaks("LT512 tasks", REWARD, adapters=[open_checkpoint(FIXTURES / CAUSAL)])
def _tasks_by_class(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = None
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers.models.qwen2.modeling_qwen2",
        }


@_breaks("LT505 output layer", CAUSAL, with_base=True)
def _output_layer_without_its_lora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.base_layer.weight"] = raw(304, 16)
    with fields(folder) as config:
        config["target_modules"] = [*config["target_modules"], "lm_head"]


@_breaks("LT207 output layer", CAUSAL)
def _output_layer_without_lora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.base_layer.weight"] = raw(304, 16)


@_breaks("LT506 output bias", CAUSAL, with_base=True)
def _output_bias_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.bias"] = raw(304)


@_breaks("LT215 bias", CAUSAL, with_base=True, quiet=True)
def _bias_of_lora_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in list(table.items()):
            if name.endswith(".lora_B.weight"):
                table[name.removesuffix("weight") + "bias"] = raw(tensor.shape[0])
    with fields(folder) as config:
        config["lora_bias"] = True


@_breaks("LT513 bias", REWARD, with_base=True)
def _head_bias_without_place(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.bias"] = raw(1)


@_breaks("LT513", REWARD, with_base=True)
def _head_under_another_name(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}classifier.weight"] = table.pop(SCORE)


@_breaks("LT513 labels", REWARD, with_base=True)
def _bias_of_other_labels(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.bias"] = raw(2)


@_breaks("LT514", CAUSAL, with_base=True)
def _two_ends_for_one(folder: Path) -> None:
    _tie(folder.parent / "base")
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(304, 16)
        table[f"{PREFIX}lm_head.weight"] = edit.scaled(raw(304, 16), 2.0)


@_breaks("LT514 tokens", CAUSAL, with_base=True)
def _other_tokens_of_one_end(folder: Path) -> None:
    _tie(folder.parent / "base")
    with fields(folder) as config:
        config["trainable_token_indices"] = {"embed_tokens": [1], "lm_head": [2]}
    with tensors(folder) as table:
        for end in ("model.embed_tokens", "lm_head"):
            table[f"{PREFIX}{end}.token_adapter.trainable_tokens_delta"] = raw(1, 16)


def _tie(base: Path) -> None:
    """Make the base one whose embeddings are tied, and stored once."""
    with fields(base, "config.json") as config:
        config["tie_word_embeddings"] = True
    _lose(base, "lm_head.weight")


def _lose(base: Path, name: str) -> None:
    with fields(base, INDEX) as index:
        file = index["weight_map"].pop(name)
    with tensors(base, file) as table:
        del table[name]


@_breaks("LT515", CAUSAL, with_base=True)
def _base_without_a_norm(folder: Path) -> None:
    _lose(folder.parent / "base", "model.norm.weight")


# LT7xx, the training run


def _log(folder: Path, *entries: Mapping[str, float]) -> None:
    """Replace the log of a checkpoint, its steps counted from 1."""
    with fields(folder, "trainer_state.json") as state:
        state["log_history"] = [{"step": at, "epoch": at / 10, **entry} for at, entry in enumerate(entries, 1)]


NAN = float("nan")


@_breaks("LT701", RUN)
def _gradient_nan(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": 0.6, "grad_norm": NAN})


@_breaks("LT701 loss", RUN)
def _loss_nan(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": NAN, "grad_norm": NAN}, {"loss": NAN, "grad_norm": NAN})


@_breaks("LT701 recovered", RUN)
def _loss_recovered(folder: Path) -> None:
    _log(folder, {"loss": NAN}, {"loss": 0.7})


@_breaks("LT701 infinite gradients", RUN)
def _gradient_infinite(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": float("inf")}, {"loss": 0.6, "grad_norm": float("inf")})


@_breaks("LT701 evaluation", RUN)
def _evaluation_nan(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"eval_loss": NAN})


@_breaks("LT701 skipped by the scaler", RUN, quiet=True)
def _skipped_step(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": float("inf")}, {"loss": 0.6, "grad_norm": 0.5})


@_breaks("LT702", RUN)
def _loss_masked(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": 0.0, "grad_norm": NAN})


@_breaks("LT702 in GRPO", RUN)
def _loss_masked_online(folder: Path) -> None:
    _log(folder, {"loss": 0.0, "grad_norm": 0.2, "reward": 1.0}, {"loss": 0.0, "grad_norm": NAN, "reward": 1.0})


@_breaks("LT702 without norms", RUN)
def _loss_masked_without_norms(folder: Path) -> None:
    _log(folder, {"loss": 0.7}, {"loss": 0.0}, {"loss": 0.0})


@_breaks("LT703", RUN)
def _no_gradient(folder: Path) -> None:
    _log(folder, *({"loss": 0.693, "grad_norm": 6e-8, "rewards/margins": 0.0} for _ in range(3)))


@_breaks("LT703 in GRPO", RUN)
def _constant_reward(folder: Path) -> None:
    entry = {"loss": 0.0, "grad_norm": 0.0, "reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    _log(folder, entry, entry)


@_breaks("LT703 towards the end", RUN)
def _saturated(folder: Path) -> None:
    _log(folder, {"loss": 4.6, "grad_norm": 0.2}, *({"loss": 4.56, "grad_norm": 0.0} for _ in range(3)))


@_breaks("LT703 learning rate", RUN)
def _no_learning_rate(folder: Path) -> None:
    _log(folder, *({"loss": 0.7, "grad_norm": 0.5, "learning_rate": 0.0} for _ in range(3)))


@_breaks("LT704", RUN)
def _diverged(folder: Path) -> None:
    _log(folder, *({"loss": 2.0 - at / 20, "grad_norm": 1.0} for at in range(20)), *({"loss": 9.8} for _ in range(6)))


@_breaks("LT704 short", RUN)
def _diverged_in_a_short_log(folder: Path) -> None:
    _log(folder, {"loss": 0.7}, {"loss": 0.6}, {"loss": 40.0})


@_breaks("LT704 worse than at the beginning", RUN)
def _diverged_from_its_best(folder: Path) -> None:
    _log(folder, *({"loss": 8.0 - at / 4} for at in range(28)), *({"loss": 9.0} for _ in range(8)))


@_breaks("LT705", WHOLE_RUN)
def _killed(folder: Path) -> None:
    with fields(folder / "checkpoint-4", "trainer_state.json") as state:
        state["max_steps"] = 100
        state["stateful_callbacks"] = {}


@_breaks("LT705 on purpose", WHOLE_RUN, quiet=True)
def _early_stopping(folder: Path) -> None:
    with fields(folder / "checkpoint-4", "trainer_state.json") as state:
        state["max_steps"] = 100


@_breaks("LT706", RUN)
def _state_of_another_step(folder: Path) -> None:
    with fields(folder, "trainer_state.json") as state:
        state["global_step"] = 4


@_breaks("LT707", RUN, quiet=True)
def _never_ends(folder: Path) -> None:
    _log(folder, *({"loss": 0.0, "grad_norm": 0.2, "reward": 1.0, "completions/clipped_ratio": 1.0} for _ in range(3)))


@_breaks("LT708", WHOLE_RUN)
def _stood_still(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-2" / WEIGHTS, folder / "checkpoint-4" / WEIGHTS)


# LT8xx, what serves it unmerged: the adapter is good, and the server cannot take it


def _set(folder: Path, **values: object) -> None:
    with fields(folder) as config:
        config.update(values)


def _plain(folder: Path) -> None:
    """Make it an adapter that every server takes: one rank, one alpha, no rsLoRA."""
    with tensors(folder) as table:
        table.update(lora("model.layers.1.self_attn.v_proj", rows=8, columns=16))
    _set(folder, rank_pattern={}, alpha_pattern={}, use_rslora=False)


@_breaks("LT801", CAUSAL, servers=["vllm"])
def _served_embedding(folder: Path) -> None:
    _plain(folder)
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16)
    _set(folder, modules_to_save=["model.norm"])


@_breaks("LT801 head", REWARD, servers=["vllm"])
@_breaks("LT801 head for SGLang", REWARD, servers=["sglang"])
@_breaks("LT811", REWARD, servers=["peft"], quiet=True)
def _served_head(folder: Path) -> None:
    assert folder.is_dir()  # every reward adapter has one


@_breaks("LT813", CAUSAL, servers=["mlx"])
def _served_by_mlx(folder: Path) -> None:
    _plain(folder)  # whatever PEFT saves


@_breaks("LT802", CAUSAL, servers=["vllm"])
@_breaks("LT802 for SGLang", CAUSAL, servers=["sglang"])
@_breaks("LT802 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_dora(folder: Path) -> None:
    _plain(folder)
    with tensors(folder) as table:
        table.update(
            {
                name.replace("lora_B.weight", "lora_magnitude_vector"): raw(tensor.shape[0])
                for name, tensor in table.items()
                if "lora_B" in name
            }
        )
    _set(folder, use_dora=True)


@_breaks("LT803", CAUSAL, servers=["vllm"])
def _served_rank(folder: Path) -> None:
    rank = 1024
    with tensors(folder) as table:
        for name, tensor in table.items():
            at = 0 if ".lora_A." in name else 1
            table[name] = raw(*(rank if index == at else side for index, side in enumerate(tensor.shape)))
    _set(folder, rank_pattern={}, alpha_pattern={}, use_rslora=False, r=rank)


@_breaks("LT804", CAUSAL, servers=["vllm"])
@_breaks("LT804 for SGLang", CAUSAL, servers=["sglang"])
def _served_tokens(folder: Path) -> None:
    _plain(folder)
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(2, 16)
    _set(folder, trainable_token_indices=[3, 5])


@_breaks("LT805", CAUSAL, servers=["vllm"])
@_breaks("LT805 for SGLang", CAUSAL, servers=["sglang"])
@_breaks("LT805 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_bias(folder: Path) -> None:
    _plain(folder)
    with tensors(folder) as table:
        table.update(
            {name.replace(".weight", ".bias"): raw(t.shape[0]) for name, t in table.items() if "lora_B" in name}
        )
    _set(folder, lora_bias=True)


@_breaks("LT806", CAUSAL, servers=["vllm"])
@_breaks("LT806 for SGLang", CAUSAL, servers=["sglang"])
def _served_patterns(folder: Path) -> None:
    _set(folder, use_rslora=False)  # it has ranks per module


@_breaks("LT807", CAUSAL, servers=["sglang"])
@_breaks("LT807 for llama.cpp", CAUSAL, servers=["llama.cpp"])
def _served_rslora(folder: Path) -> None:
    _plain(folder)
    _set(folder, use_rslora=True)


@_breaks("LT808", CAUSAL, servers=["vllm"])
@_breaks("LT808 for SGLang", CAUSAL, servers=["sglang"])
@_breaks("LT808 for PEFT", CAUSAL, servers=["peft"])
def _served_init(folder: Path) -> None:
    _plain(folder)
    _set(folder, init_lora_weights="pissa_niter_4")


@_breaks("LT808 for LoRA-GA", CAUSAL, servers=["peft"])
def _served_lora_ga(folder: Path) -> None:
    _plain(folder)
    _set(folder, init_lora_weights="lora_ga")


@_breaks("LT808 for CorDA", CAUSAL, servers=["peft"])
def _served_corda(folder: Path) -> None:
    _plain(folder)
    _set(folder, init_lora_weights="corda")


@_breaks("LT809", CAUSAL, servers=["sglang"])
def _served_regex(folder: Path) -> None:
    _plain(folder)
    with fields(folder) as config:
        config["target_modules"] = rf".*\.({'|'.join(config['target_modules'])})"


@_breaks("LT810", CAUSAL, servers=["vllm"])
@_breaks("LT810 for SGLang", CAUSAL, servers=["sglang"])
def _served_alora(folder: Path) -> None:
    _plain(folder)
    _set(folder, alora_invocation_tokens=[1, 2])


@_breaks("LT812", CAUSAL, servers=["vllm"], with_base=True)
def _served_text_names(folder: Path) -> None:
    _plain(folder)
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        text = {**config, "model_type": "llama4_text"}
        config.update(model_type="llama4", architectures=["Llama4ForConditionalGeneration"], text_config=text)
    with fields(base, "model.safetensors.index.json") as index:
        index["weight_map"] = {f"language_model.{name}": file for name, file in index["weight_map"].items()}
        index["weight_map"]["vision_model.norm.weight"] = next(iter(index["weight_map"].values()))
    for path in base.glob("*.safetensors"):
        with tensors(base, path.name) as table:
            held = {f"language_model.{name}": tensor for name, tensor in table.items()}
            table.clear()
            table.update(held)
            if path.name == index["weight_map"]["vision_model.norm.weight"]:
                table["vision_model.norm.weight"] = raw(16)


from tests import mutations_merged  # noqa: E402, F401 - registers the injuries of merged models

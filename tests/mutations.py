"""One small named injury per rule, done to a copy of a good fixture: the proof that each rule sees what it is for.

`MUTATIONS` maps a name, which begins with the code it must give, to the injury and the folder it is done to. Some
codes have more than one: the forms in which a disease is met.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import CONFIG, INDEX, PREFIX, WEIGHTS, fields, lora, raw, tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"
CAUSAL = "causal-llama/adapter"
REWARD = "reward-qwen2/adapter"
RUN = "reward-run/checkpoint-2"
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


MUTATIONS: dict[str, Mutation] = {}


def _breaks(
    name: str, of: str, *, with_base: bool = False, quiet: bool = False, **options: object
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(injure: Callable[[Path], None]) -> Callable[[Path], None]:
        code = name.partition(" ")[0]
        MUTATIONS[name] = Mutation(code=code, of=of, injure=injure, options=options, with_base=with_base, quiet=quiet)
        return injure

    return register


def copy_of(fixture: str, where: Path) -> Path:
    """Copy the fixture that `fixture` (``causal-llama/adapter``) lies in, and return the copy of it."""
    root, _, folder = fixture.partition("/")
    shutil.copytree(FIXTURES / root, where / root)
    return where / root / folder


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


@_breaks("LT114", SHARDED)
def _stray(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00005-of-00005.safetensors")


@_breaks("LT115", CAUSAL)
def _no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


# LT2xx, the adapter


@_breaks("LT201", CAUSAL)
def _without_b(folder: Path) -> None:
    with tensors(folder) as table:
        del table[f"{Q_PROJ}.lora_B.weight"]


@_breaks("LT201 without A", REWARD)
def _without_a(folder: Path) -> None:
    with tensors(folder) as table:
        del table[f"{Q_PROJ}.lora_A.weight"]


@_breaks("LT202", CAUSAL)
def _ranks_disagree(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = raw(16, 2)


@_breaks("LT202 flat", CAUSAL)
def _flattened(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = raw(64)


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


@_breaks("LT208", CAUSAL)
def _never_moved(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in table.items():
            if ".lora_B." in name:
                table[name] = raw(*tensor.shape, value=0.0)


@_breaks("LT209", CAUSAL)
def _nan(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = raw(4, 16, value=float("nan"))


@_breaks("LT209 in the head", REWARD)
def _infinite_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[SCORE] = raw(1, 16, dtype="BF16", value=float("inf"))


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


@_breaks("LT211 doubled", CAUSAL)
def _doubled(folder: Path) -> None:
    edit.renamed(folder, lambda name: PREFIX + name)


@_breaks("LT212", CAUSAL)
def _integers(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = raw(4, 16, dtype="I8")


@_breaks("LT213", REWARD)
def _original_module(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.original_module.weight"] = table[SCORE]


@_breaks("LT213 both copies", REWARD)
def _raw_state(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}score.modules_to_save.default.weight"] = table[SCORE]
        table[f"{PREFIX}score.original_module.weight"] = table[SCORE]


@_breaks("LT213 base layers", CAUSAL)
def _base_layers(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.base_layer.weight"] = raw(16, 16)


@_breaks("LT214", CAUSAL)
def _string_r(folder: Path) -> None:
    with fields(folder) as config:
        config["r"] = "4"


@_breaks("LT214 no peft_type", CAUSAL)
def _no_peft_type(folder: Path) -> None:
    with fields(folder) as config:
        del config["peft_type"]


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
def _pissa(folder: Path) -> None:
    with fields(folder) as config:
        config["init_lora_weights"] = "pissa"


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


# LT3xx, the head


@_breaks("LT301", REWARD)
def _no_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[SCORE]


@_breaks("LT301 in a run", RUN)
def _no_head_in_run(folder: Path) -> None:
    _no_head(folder)


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


# LT5xx, the adapter against its base


@_breaks("LT501", CAUSAL, with_base=True)
def _absent_module(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.0.cross_attn.q_proj", rows=16, columns=16))


@_breaks("LT502", CAUSAL, with_base=True)
def _other_width(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_A.weight"] = raw(4, 24)


@_breaks("LT502 rows", REWARD, with_base=True)
def _other_height(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{Q_PROJ}.lora_B.weight"] = raw(24, 4)


@_breaks("LT503", CAUSAL, with_base=True)
def _layer_beyond(folder: Path) -> None:
    with tensors(folder) as table:
        table.update(lora("model.layers.7.self_attn.q_proj", rows=16, columns=16))


@_breaks("LT504", CAUSAL, with_base=True)
def _smaller_vocabulary(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(290, 16)
    with fields(folder) as config:
        config["modules_to_save"] = ["embed_tokens"]


@_breaks("LT505", CAUSAL, with_base=True)
def _layer_lost(folder: Path) -> None:
    with tensors(folder) as table:
        for name in [name for name in table if "layers.1.mlp.down_proj" in name]:
            del table[name]


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

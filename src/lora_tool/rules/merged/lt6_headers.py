"""LT601 to LT604, LT613, LT615 to LT617: faults in a merged model's names, shapes and JSON files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tool.checkpoints.models import other_models
from lora_tool.core.display import counted
from lora_tool.core.errors import CorruptFile
from lora_tool.core.keys import has_lora_factor
from lora_tool.core.report import Severity
from lora_tool.formats import model_config
from lora_tool.formats.files import parse_json, read_json
from lora_tool.formats.quantised.bitsandbytes import STATE
from lora_tool.formats.tokenizer import FILE_NAMES
from lora_tool.models import architecture_of, is_computed
from lora_tool.models.ends import head_of
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import ModelSubject
from lora_tool.rules.merged.subject import MergedSubject

_WEIGHTS = frozenset({Need.WEIGHTS})
_PLAN = frozenset({Need.WEIGHTS, Need.PLAN})
_ADAPTER_NAME = re.compile(
    r"^base_model\.|(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|modules_to_save"
    r"|original_module|token_adapter|trainable_tokens_delta)(\.|$)"
)

_STRUCTURE = [
    "model_type",
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "n_inner",
    "d_ff",
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_attention_heads",
    "n_head",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
]
"""Fields of `config.json` that decide what the same weights compute."""
_MAY_DIFFER = frozenset({"vocab_size", "tie_word_embeddings"})
"""Fields that a model changes when it is trained from its base, and its tensors with them."""
_IN_TOKENIZER_JSON = frozenset(
    {"vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"}
)
"""What newer versions of transformers write into tokenizer.json instead."""
_ROTARY = ("rope_parameters", "rope_scaling")
_ROTARY_FIELDS = (
    "rope_theta",
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
)


@rule("LT601", Severity.ERROR, on=ModelSubject, needs=_WEIGHTS)
def adapter_keys_left(subject: ModelSubject) -> Iterator[Fault]:
    """Adapter tensors left in a merged model.

    What it does: Looks for PEFT's names (`lora_A`, `base_layer`, `modules_to_save`, `base_model.`) in a model. LoRA that
    the model's config declares (`vision_lora` of Phi-4-multimodal) is part of its class.
    Why it matters: The adapter was never merged: `save_pretrained` ran on the wrapped model. transformers finds none of
    the weights under their names and initialises random ones, with only a log line.
    Example: `base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight` in `model.safetensors`.
    What to do: Merge again, `lora-tool merge ADAPTER`, or call `merge_and_unload()` before saving. If there is no
    adapter, take it out of these weights: `lora-tool consolidate MODEL`.
    """
    expected = subject.expected or {}
    which = ["--tag", "model"] if other_models(subject.checkpoint.folder) else []
    command = shlex.join(["lora-tool", "consolidate", str(subject.checkpoint.root), *which])
    hint = f"take the adapter out, then merge it: {command}" if any(map(has_lora_factor, subject.tensors)) else None
    left = [name for name in subject.tensors if name not in expected and _ADAPTER_NAME.search(name)]
    if left and not _is_declared(subject, left):
        first = next(filter(has_lora_factor, left), left[0])
        others = f", as are those of {counted(len(left) - 1, 'more tensor')}" if left[1:] else ""
        message = f"is a PEFT name{others}: the adapter lies beside the weights and was not merged into them"
        yield Fault(subject=first, message=message, path=subject.tensors[first].path, hint=hint)


_NAMED_ADAPTER = re.compile(r"\.lora_[AB]\.(?P<name>\w+)\.weight\Z")


def _is_declared(subject: ModelSubject, names: Sequence[str]) -> bool:
    """Return whether every adapter among the names of a model's weights has a table in its config: `vision_lora`."""
    adapters = {found["name"] for name in names if (found := _NAMED_ADAPTER.search(name))}
    raw = subject.checkpoint.config.raw if subject.checkpoint.config else {}
    wrapped = any("base_model." in name for name in names)
    return bool(adapters) and not wrapped and all(isinstance(raw.get(f"{name}_lora"), dict) for name in adapters)


@rule("LT602", Severity.ERROR, on=ModelSubject, needs=_PLAN)
def tensor_missing(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor is missing from a merged model.

    What it does: Compares the weights' names with what base and adapter give, or the ledger of `lora_tool.json`.
    Why it matters: transformers initialises a missing tensor at random, with only a log line.
    Example: A merge that goes shard by shard stopped after the second of three.
    What to do: Write it again, with the command that wrote it, into a new folder.
    """
    for name, spec in (subject.expected or {}).items():
        if name not in subject.tensors and name not in _forgotten_head(subject):
            recomputed = is_computed(name)
            message = "is missing" + (": a buffer that transformers computes" if recomputed else "")
            severity = Severity.INFO if recomputed else None
            yield Fault(subject=name, message=f"{message}; expected {spec.dtype} {list(spec.shape)}", severity=severity)


@rule("LT603", Severity.ERROR, on=ModelSubject, needs=_PLAN)
def tensor_nobody_expects(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor in a merged model that neither base nor adapter has.

    What it does: Compares the weights' names with what base and adapter give, or the ledger of `lora_tool.json`.
    Why it matters: Either transformers ignores it on loading, or it replaces another tensor.
    Example: `lm_head.weight` in a reward model; `v_head.summary.weight` from another trainer.
    What to do: Merge again with its base and adapter.
    """
    expected = subject.expected
    if expected is None:
        return
    config = subject.checkpoint.config
    arch = architecture_of(config.model_type or "") if config else None
    ends = set(arch.causal_only) if arch else set()
    for name, tensor in subject.tensors.items():
        if name in expected or _ADAPTER_NAME.search(name) or (name in ends and _forgotten_head(subject)):
            continue
        harmless = None
        if name in ends and config is not None and config.tie_word_embeddings is True:
            harmless = "is in the file, although the config ties it to the embeddings"
        elif is_computed(name):
            harmless = "is a buffer that transformers computes and does not load"
        message = harmless or "comes neither from the base nor from the adapter"
        yield Fault(subject=name, message=message, path=tensor.path, severity=Severity.INFO if harmless else None)


@rule("LT604", Severity.ERROR, on=ModelSubject, needs=_PLAN)
def other_shape_or_type(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor of a merged model has the wrong shape or dtype.

    What it does: Compares shapes and dtypes with what base and adapter give, or with the ledger of `lora_tool.json`.
    Why it matters: A tensor of a wrong shape does not load. Another float type may be intended, so it is reported as
    info.
    Example: `score.weight` is [2, 4096], but the adapter's head is [1, 4096].
    What to do: Merge again with the base that the adapter was trained on.
    """
    casts: dict[tuple[str, str], int] = {}
    for name, spec in (subject.expected or {}).items():
        tensor = subject.tensors.get(name)
        if tensor is None:
            continue
        as_long = tensor.shape == spec.shape or STATE in name  # JSON, which may have other digits and spaces
        if not as_long or tensor.dtype.is_float != spec.dtype.is_float:
            found, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
            yield Fault(subject=name, message=f"is {found}, expected {wanted}", path=tensor.path)
        elif tensor.dtype is not spec.dtype:
            pair = (str(tensor.dtype), str(spec.dtype))
            casts[pair] = casts.get(pair, 0) + 1
    for (found, wanted), count in casts.items():
        message = f"{counted(count, 'tensor')} of type {found}, but base and adapter give {wanted}"
        yield Fault(message=message, severity=Severity.INFO if isinstance(subject, MergedSubject) else None)


def _forgotten_head(subject: ModelSubject) -> frozenset[str]:
    """Return the head tensors that base or adapter give and the model lacks."""
    lacking = (subject.expected or {}).keys() - subject.tensors.keys()
    return frozenset(name for name in lacking if _is_head(subject, name)) if lacking else frozenset()


def _is_head(subject: ModelSubject, name: str) -> bool:
    config = subject.checkpoint.config
    arch = architecture_of(config.model_type or "") if config else None
    if arch is not None and arch.head is not None and name.startswith(f"{arch.head}."):
        return True
    return head_of(name.rpartition(".")[0]) is not None


@rule("LT613", Severity.ERROR, on=ModelSubject, needs=_PLAN)
def head_left_out(subject: ModelSubject) -> Iterator[Fault]:
    """The merged model lacks the trained head.

    What it does: Looks in the merged model for the score head of the adapter or base.
    Why it matters: Without it the folder is a language model, or a classifier with a random head whose rewards mean
    nothing. PEFT merges a reward adapter into a causal LM without a warning, and so do merge scripts that know only
    `.weight` pairs.
    Example: The adapter holds `base_model.model.score.weight`, but the merged folder has an `lm_head` and no `score`.
    What to do: Merge again as a reward model: `lora-tool merge --rm ADAPTER`.
    """
    for name in sorted(_forgotten_head(subject)):
        config = subject.checkpoint.config
        as_what = f", whose config says {config.architectures[0]}" if config and config.architectures else ""
        yield Fault(subject=name, message=f"the trained head is not in the merged model{as_what}")


@rule("LT615", Severity.WARNING, on=ModelSubject)
def tokenizer_missing(subject: ModelSubject) -> Iterator[Fault]:
    """The tokenizer, chat template or pooling modules were not copied.

    What it does: Looks in the merged folder for the tokenizer and processor files of adapter and base, including the
    chat template; for an embedding model also for the files of sentence-transformers. A model that is compared only
    with its base must have a tokenizer if the base has one.
    Why it matters: A folder without its tokenizer is used with one from elsewhere. With other special tokens or another
    chat template, the model sees other inputs than it was trained on. Without `modules.json`, sentence-transformers
    pools an embedding model by the mean, however it was trained.
    Example: `chat_template.jinja` lies beside the adapter, but not in the merged folder.
    What to do: Copy the files that training used: `cp ADAPTER/chat_template.jinja MERGED/`.
    """
    from lora_tool.formats.sentence_transformers import root_files  # only merged models need it

    files = set(subject.checkpoint.folder.files)
    if not isinstance(subject, MergedSubject):
        yield from _no_tokenizer(subject, files)
        return
    planned = subject.planned.files if subject.planned else ()
    copied = {file.filename: file.source for file in planned if file.source is not None}
    ours = FILE_NAMES.union(root_files(copied))
    for name, source in copied.items():
        if (name not in ours and "/" not in name) or (subject.checkpoint.root / name).is_file():
            continue
        if ("tokenizer.json" in files and name in _IN_TOKENIZER_JSON) or (
            name.startswith("chat_template") and _has_template(subject)
        ):
            continue
        hint = shlex.join(["cp", str(source), f"{subject.checkpoint.root / Path(name).parent}/"])
        yield Fault(subject=name, message="is not in the merged folder", hint=hint)


def _no_tokenizer(subject: ModelSubject, files: set[str]) -> Iterator[Fault]:
    theirs = sorted(FILE_NAMES & set(subject.base.folder.files)) if subject.base else []
    if subject.base is not None and theirs and not files & FILE_NAMES:
        hint = shlex.join(["cp", *(str(subject.base.root / name) for name in theirs), f"{subject.checkpoint.root}/"])
        yield Fault(
            subject=theirs[0], message="is in the base's folder, but the model's folder has no tokenizer", hint=hint
        )


def _has_template(subject: MergedSubject) -> bool:
    """Whether the template is where older versions of transformers wrote it."""
    root, files = subject.checkpoint.root, subject.checkpoint.folder.files
    if {"chat_template.jinja", "chat_template.json"} & set(files):
        return True
    try:
        config = read_json(root / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    except CorruptFile:
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


@rule("LT616", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG, Need.PLAN}))
def other_config(subject: ModelSubject) -> Iterator[Fault]:
    """The config does not match the merged weights.

    What it does: Compares `config.json` with what base and adapter give: class, labels, and the fields that decide what
    the weights compute (layers, heads, sizes, rotary base, norm epsilon, tied embeddings). Compared only with a base,
    it is a warning, as training may have changed these fields on purpose, and the class, the vocabulary and tying are
    not compared.
    Why it matters: The same weights under another config are a different model: it loads, but its answers are wrong.
    Example: `rope_theta` is 10000.0, but 1000000.0 in the base; the class is `LlamaForCausalLM` for a merged reward
    model.
    What to do: Copy the base's `config.json` and set `architectures`, `id2label`, `label2id` and `pad_token_id` as
    trained, or merge again with `lora-tool merge`, which does so.
    """
    config = subject.checkpoint.config
    merged = isinstance(subject, MergedSubject)
    of_base = subject.base.config if subject.base is not None else None
    raw_of_base = None if of_base is None else of_base.raw
    wanted = _planned_config(subject) if isinstance(subject, MergedSubject) else raw_of_base
    if config is None or wanted is None:
        return
    path = str(config.path)
    classes = tuple(wanted.get("architectures") or ()) if merged else ()
    if classes and classes[:1] != config.architectures[:1] and not _forgotten_head(subject):
        message = f"is {next(iter(config.architectures), 'not set')}; expected {classes[0]}"
        yield Fault(subject="architectures", message=message, path=path)
    found, expected = _structure(config.raw), _structure(wanted)
    for name in sorted(found.keys() & expected.keys()):
        said, wanted_text = json.dumps(found[name]), json.dumps(expected[name])  # where NaN is NaN
        if found[name] != expected[name] and said != wanted_text and (merged or name not in _MAY_DIFFER):
            message = f"is {said[:60]}, expected {wanted_text[:60]}"
            yield Fault(subject=name, message=message, path=path, severity=None if merged else Severity.WARNING)


def _structure(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain fields that change what the weights compute, from wherever transformers 4 and 5 put them."""
    text = raw.get("text_config")
    places = [raw, text if isinstance(text, dict) else {}]
    places += [nested for place in places for name in _ROTARY if isinstance(nested := place.get(name), dict)]
    plain = (str, int, float, bool)
    return {
        name: place[name]
        for place in places
        for name in (*_STRUCTURE, *(_ROTARY_FIELDS if place not in (raw, text) else ()))
        if isinstance(place.get(name), plain)
    }


def _planned_config(subject: MergedSubject) -> dict[str, Any] | None:
    """Return the config that the plan would write."""
    for file in subject.planned.files if subject.planned else ():
        if file.filename == model_config.FILE_NAME:
            source = Path(file.source) if file.source is not None else Path(file.filename)
            raw = read_json(source) if file.content is None else parse_json(file.content, source)
            return raw if isinstance(raw, dict) else None
    return None


@rule("LT617", Severity.ERROR, on=MergedSubject)
def other_inputs(subject: MergedSubject) -> Iterator[Fault]:
    """The model was merged from a different base or adapter.

    What it does: Compares the fingerprints of the given base and adapter with those recorded in `lora_tool.json`.
    Why it matters: The model was made from other inputs, or its inputs have changed since, so these cannot prove it
    right.
    Example: The adapter's folder was overwritten by the next training run.
    What to do: Give the base and adapter that were merged: `lora-tool verify MERGED --base B --adapter A`.
    """
    manifest = subject.checkpoint.manifest
    for name, found in subject.inputs.items():
        recorded = manifest.input(name).get("fingerprint") if manifest else None
        if isinstance(recorded, str) and recorded != found:
            message = (
                f"this {name} is not the one that was merged: its fingerprint is {found[:12]}, but "
                f"{recorded[:12]} was recorded"
            )
            root = shlex.quote(str(subject.checkpoint.root))
            hint = f"compare it with the recorded {name}: lora-tool verify {root}; or merge again with this one"
            yield Fault(subject=f"inputs.{name}", message=message, path=manifest.path if manifest else None, hint=hint)

"""Planning a judge as a sequence classifier: its trunk as it is, and `score` in place of its output layer.

A judge is a language model, or an adapter of one, whose answer is one token. Its score, logit(yes) - logit(no) at the
last token, is (W[yes] - W[no])·h, which is a linear layer on the same hidden state. Labels of a classifier are chosen
and subtracted in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from lora_tool.adapters.view import FACTORS, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir, require_whole
from lora_tool.checkpoints.quantised import in_full_precision, metadata_in_files, quantisation_table
from lora_tool.core.display import counted
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import parse
from lora_tool.core.report import Finding, Severity
from lora_tool.core.tensors import StoredTensor, TensorAction
from lora_tool.formats.patterns import is_path
from lora_tool.models.ends import is_output
from lora_tool.plans.adapter.config_file import config_file as adapter_config_file
from lora_tool.plans.algebra.head_rows import (
    is_of_head,
    is_of_output,
    merge_first,
)
from lora_tool.plans.algebra.whole_plan import SAME, adapter_plan, beginnings_of, described, stamps_of, weights_of
from lora_tool.plans.base.module_files import ModuleSideFiles, module_files
from lora_tool.plans.base.side_files import (
    classifier_changes,
    config_file,
    copied_files,
    left_out,
    owners,
    pad_token,
    quantisation_file,
)
from lora_tool.plans.base.task import Task
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.convert.labels import (
    VLLM_FIELDS,
    Asked,
)
from lora_tool.plans.convert.new_head import NewHead, head_for
from lora_tool.plans.convert.peft_names import PeftNames, modules_of, peft_names
from lora_tool.plans.convert.plan_convert import hint_of_names, renamed_steps
from lora_tool.plans.core.ops import Copy, Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, SideFile, Step, base_files, index_files, lay_out
from lora_tool.plans.merge.quantised.skip_lists import with_plain_modules
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.engine.subjects import ModelSubject
from lora_tool.rules.judging import Judge, MergeJudge

_TASK = "SEQ_CLS"


def plan_seq_cls(
    source: AdapterDir | ModelDir, base: ModelDir | None, asked: Asked, *, ignore: Iterable[str] = ()
) -> Plan:
    """Return the plan of a judge, or of a classifier, as a classifier with the head that is asked for.

    An adapter stays an adapter, of `base`, a model a model: every other tensor keeps its bytes. Reads the rows that the
    head is made of. The rules judge the input first; `ignore` are codes whose errors do not refuse it. Raises
    `FindingsFound`, `UnsupportedAdapter` by the name of what is in the way, `IncompatibleBase`, `WrongValue`.
    """
    require_whole(source)
    if isinstance(source, ModelDir):
        judge = Judge(rules=chosen((), tuple(ignore)), deep=False)
        report = judge.folder(ModelSubject(checkpoint=source))
        report.raise_at(Severity.ERROR)
        return _of_model(source, asked, report.findings)
    if base is None:
        raise UnsupportedAdapter(
            f"{source.root}: the base is not at hand, and the rows of the head come from it",
            hint="give the model that it was trained on: `base=MODEL`",
        )
    found = MergeJudge(untie=True, ignore=tuple(ignore)).as_stored((source,), base)
    return _of_adapter(source, base, asked, found.findings)


# A model.


def _of_model(model: ModelDir, asked: Asked, findings: tuple[Finding, ...]) -> Plan:
    head = head_for(model, model, None, asked)
    gone = is_of_output if head.is_new else is_of_head
    steps = [
        Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="copied from the model")
        for name, tensor in model.tensors.items()
        if not gone(name)
    ]
    steps.append(head.step)
    config, metadata = model.whole_config, None
    if quantisation_table(config):
        # a head is plain, and a loader must not expect codes of it
        config = with_plain_modules(model, in_full_precision(model), {head.step.out.name}, str)
        metadata = metadata_in_files(model)
    shards = lay_out(steps, homes=base_files(steps, model.tensors), max_shard_bytes=None, metadata=metadata)
    pad = pad_token((), model)
    pad_id = pad.id if pad is not None else model.whole_config.pad_token_id
    modules = ModuleSideFiles() if head.is_new else module_files(owners((), model), Task.SEQ_CLS)
    files: tuple[SideFile, ...] = (
        config_file(replace(model, config=config), _config_changes(model, head, pad_id)),
        *quantisation_file(model, config),
        *copied_files((), model, generation=False),
        *modules.files,
        *index_files(shards),
    )
    kept = {file.filename for file in files}
    return Plan(
        shards=shards,
        side_files=files,
        leftovers=tuple(_left_out(name, tensor, head) for name, tensor in model.tensors.items() if gone(name)),
        inputs=stamps_of((model,), files),
        precision=Precision.FLOAT64,
        hashed=weights_of((model,)),
        findings=findings,
        warnings=(*head.warnings, *modules.warnings),
        notes=(f"{_what(head)} from {model.root}", *head.notes, *left_out(model, kept), *modules.notes),
        manifest={
            "operation": "convert",
            "to": AdapterForm.SEQ_CLS.value,
            **head.as_json(),
            "merged_adapters": [*(model.manifest.merged_adapters if model.manifest else ())],
            "inputs": {"base": described(model)},
        },
    )


def _what(head: NewHead) -> str:
    return f"{AdapterForm.SEQ_CLS} with {counted(len(head.labels), 'label')}"


def _config_changes(model: ModelDir, head: NewHead, pad_id: int | None) -> dict[str, Any]:
    raw, names = model.whole_config.raw, [label.name for label in head.labels]
    class_name = head.classifier or model.whole_config.architectures[0]
    changes = classifier_changes(model, class_name, len(names), pad_id, names)
    return changes | {name: None for name in VLLM_FIELDS if name in raw}


def _left_out(name: str, tensor: StoredTensor, head: NewHead) -> InputRecord:
    """Return that a tensor of the layer in whose place the head is has no place in the output."""
    reason = f"{head.step.out.name} is in its place"
    return InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=reason)


# An adapter.


def _of_adapter(adapter: AdapterDir, base: ModelDir, asked: Asked, findings: tuple[Finding, ...]) -> Plan:
    view = view_of(adapter)
    head = head_for(adapter, base, view, asked)
    if beginnings_of(view, base) != SAME:
        raise UnsupportedAdapter(
            f"{adapter.root}: it was trained on the text model of {base.root}, and the classifier is the whole model, whose "
            "modules have other names",
            hint=merge_first(base, view),
        )
    model = modules_of(base, view.config)
    held = peft_names(view, model, hint_of_names(adapter, view.config, base, model))
    named = _without(held, head)
    if not any(key.part in FACTORS for key in map(parse, named.tensors)):
        raise UnsupportedAdapter(
            f"{adapter.root}: it has no LoRA besides that on the output layer, and PEFT loads no adapter without any",
            hint=merge_first(base, view),
        )
    steps = (*renamed_steps(named), head.step)
    outputs = (tensor for name, tensor in held.tensors.items() if name not in named.tensors)
    used = {tensor.name for tensor in head.step.op.inputs if tensor.path.parent == adapter.root}
    dropped = [
        InputRecord(path=adapter.tensors[name].path, name=name, action=TensorAction.DROPPED, reason=reason)
        for name, reason in held.dropped
    ]
    dropped += [_left_out(each.name, each, head) for each in outputs if each.name not in used]
    plan = adapter_plan(
        (adapter,),
        (1.0,),
        steps,
        adapter_config_file(named.config, named.changes, named.why),
        dropped=dropped,
        findings=findings,
        notes=(f"{_what(head)} from adapter {adapter.root}", *head.notes, _for_peft(head)),
        ranks=(),
        base=base,
        manifest={"operation": "convert", "to": AdapterForm.SEQ_CLS.value, **head.as_json()},
    )
    return replace(plan, warnings=(*plan.warnings, *head.warnings))


def _for_peft(head: NewHead) -> str:
    count = len(head.labels)
    return f"PEFT loads it into a base with num_labels={count}: AutoModelForSequenceClassification.from_pretrained(BASE, num_labels={count})"


def _without(held: PeftNames, head: NewHead) -> PeftNames:
    """Return the adapter without the layer in whose place the head is, with the head in `modules_to_save`."""

    def is_gone(path: str) -> bool:
        return is_output(path) if head.is_new else path.rpartition(".")[2] == head.module.rpartition(".")[2]

    config = held.config
    saved = (*(name for name in config.modules_to_save if not is_gone(name)), head.module)
    changes: dict[str, Any] = {"task_type": _TASK, "modules_to_save": list(dict.fromkeys(saved))}
    if isinstance(config.target_modules, tuple):
        changes["target_modules"] = [name for name in config.target_modules if not is_gone(name)]
    for name, table in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        if any(is_path(key) and is_gone(key) for key in table):
            changes[name] = {key: value for key, value in table.items() if not (is_path(key) and is_gone(key))}
    if any(map(is_gone, config.token_indices)):
        changes["trainable_token_indices"] = {
            key: [*rows] for key, rows in config.token_indices.items() if not is_gone(key)
        }
    if config.ensure_weight_tying and head.is_new:
        changes["ensure_weight_tying"] = False
    if config.trained_class is not None:
        changes["auto_mapping"] = None
    return replace(
        held,
        tensors={name: tensor for name, tensor in held.tensors.items() if not is_gone(parse(name).module)},
        changes={**held.changes, **changes},
        why=(*held.why, f"task_type {_TASK} and {head.module} in modules_to_save"),
    )

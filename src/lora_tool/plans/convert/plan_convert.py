"""Planning a conversion: an adapter's tensors under the names of another program, as copies of byte spans."""

from __future__ import annotations

import shlex
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import ADAPTER_WEIGHTS, VALUE_HEAD, AdapterDir, ModelDir, require_whole
from lora_tool.core import keys
from lora_tool.core.choices import codes
from lora_tool.core.errors import CorruptFile, UnsupportedAdapter
from lora_tool.core.keys import PREFIX, parse
from lora_tool.core.report import Report, Severity
from lora_tool.core.tensors import DType, StoredTensor, TensorAction
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.stored import read_part
from lora_tool.formats.weights import Weights, read_single
from lora_tool.models import architecture_of
from lora_tool.models.ends import is_output
from lora_tool.models.model_tensors import ModuleNames
from lora_tool.plans.adapter.config_file import config_file
from lora_tool.plans.algebra.plan_prepare import plan_prepare
from lora_tool.plans.algebra.spool import Spool
from lora_tool.plans.algebra.whole_plan import described, stamps_of, weights_of
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.convert.peft_names import PeftNames, modules_of, peft_names, way_out
from lora_tool.plans.convert.plan_experts import plan_experts
from lora_tool.plans.core.manifest import adapters_in
from lora_tool.plans.core.ops import Precision, copied_as, row_ops
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step, copied_file
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.judging import FOREIGN_CALL, NO_BASE, OF_LOADING, WEIGHTS_BESIDE, Judge

# Planning an adapter's tensors as MLX-LM reads them, every value as it is.


def plan_to_mlx(adapter: AdapterDir, base: ModelDir | None, *, ignore: Iterable[str] = ()) -> Plan:
    """Return the plan that writes an adapter as MLX-LM reads it, with every value as it is: for one rank and one scaling.

    Raises `UnsupportedAdapter` where modules have several, and as `plan_prepare`.
    """
    root = shlex.quote(str(adapter.root))

    def no_spool() -> Spool:
        raise UnsupportedAdapter(
            f"{adapter.root}: its ΔW cannot be computed without the base, and its factors would get other values",
            hint=f"to write the same ΔW: lora-tool prepare {root} --for mlx --base BASE -o OUT",
        )

    plan = plan_prepare(adapter, Server.MLX, base=base, ignore=ignore, spool=no_spool)
    changed = [
        step for shard in plan.shards for step in shard.steps if not all(part.keeps_values for part in row_ops(step.op))
    ]
    if changed:
        raise UnsupportedAdapter(
            f"{adapter.root}: its modules have several ranks or scalings, but MLX-LM has one of each: "
            f"`{changed[0].out.name}` would have other values, {changed[0].reason}",
            hint=f"to write the same ΔW with one rank and one scaling: lora-tool prepare {root} --for mlx -o OUT",
        )
    return replace(plan, manifest={**plan.manifest, "operation": "convert", "to": "mlx"})


def plan_convert(
    adapter: AdapterDir,
    *,
    to: AdapterForm | str,
    rebuilt: Mapping[str, Any] | None = None,
    base: ModelDir | None = None,
    why_no_base: str = NO_BASE,
    reward: bool = False,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan that writes `adapter` in the form `to`, from headers alone; nothing is written.

    "peft": wrappers, prefixes and adapter names in the tensors' names become what PEFT loads; every tensor keeps its
    values. An adapter of another program is given as PEFT has it, with the fields of PEFT's config in `rebuilt`. "mlx":
    what MLX-LM reads, every tensor with its values, transposed. "peft-experts" and "peft-fused": LoRA on experts one by
    one, or fused. `base` is the model that the adapter was trained on: where names have lost a prefix its modules tell
    which; None where it is not at hand, and `why_no_base` says why. With `reward` the value head beside the adapter of
    a causal LM becomes the score head of a classifier. The rules judge the adapter under its new names; `ignore` are
    codes whose errors do not refuse the adapter. Raises `FindingsFound` for the other errors, `UnsupportedAdapter` for
    names that fit two readings, `CheckpointError` where a file is broken, `UnknownRule`, `WrongValue`.
    """
    form, ignored = AdapterForm(to), codes(ignore)
    require_whole(adapter)
    if form is AdapterForm.MLX:
        return plan_to_mlx(adapter, base, ignore=ignored)
    if form in (AdapterForm.PEFT_EXPERTS, AdapterForm.PEFT_FUSED):
        return plan_experts(adapter, form, base, ignore=ignored)
    view = view_of(adapter)
    model = modules_of(base, view.config)
    named = peft_names(view, model, hint_of_names(adapter, view.config, base, model))
    head = value_head_of(adapter) if reward else None
    if head is not None:
        named = with_score(named, head, adapter, base)
        ignored = (*ignored, WEIGHTS_BESIDE)
    report = _judged(
        adapter, named, Judge(rules=chosen((*OF_LOADING, FOREIGN_CALL), ignored), base=base, why_no_base=why_no_base)
    )
    report.raise_at(Severity.ERROR)
    steps = tuple(renamed_steps(named))
    side_files = (config_file(named.config, named.changes, named.why, rebuilt=rebuilt), *_beside(adapter))
    renamed = sum(step.out.name != step.op.source.name for step in steps)
    record = described(adapter)
    notes = f"{form} from adapter {adapter.root}, {renamed} of {len(steps)} tensors renamed"
    notes += ", all transposed" if all(step.op.source.is_transposed for step in steps) else ""
    return Plan(
        shards=(Shard(filename=ADAPTER_WEIGHTS, steps=steps),),
        side_files=side_files,
        leftovers=tuple(
            InputRecord(path=adapter.tensors[name].path, name=name, action=TensorAction.DROPPED, reason=reason)
            for name, reason in named.dropped
        ),
        inputs=(*stamps_of((adapter,), side_files), *(head.weights.stamps if head else ())),
        precision=Precision.FLOAT32,
        findings=report.findings,
        notes=(
            notes,
            *([] if head is None else [_constant(head)]),
            *([] if model else [f"not compared with the modules of its base: {_why_not_compared(base, why_no_base)}"]),
        ),
        manifest={
            "operation": "convert",
            "to": form.value,
            **({} if head is None else {"value_head": {"file": head.name, "constant": head.constant}}),
            "merged_adapters": adapters_in([(adapter, str(record["fingerprint"]))]),
            "ignored": list(ignored),
            "inputs": {"adapter": record, **({"base": described(base)} if base and model else {})},
        },
        hashed=weights_of((adapter,)),
    )


def hint_of_names(adapter: AdapterDir, config: AdapterConfig, base: ModelDir | None, model: ModuleNames | None) -> str:
    """Return the hint for names that fit two readings."""
    if base is not None and base.config is not None and not model:
        return way_out(base.config.model_type)
    if config.task_type is None and base is not None:
        return f'write the task of the training into {config.path.name}: "task_type": "CAUSAL_LM"'
    return f"give the model that it was trained on: lora-tool convert {shlex.quote(str(adapter.root))} --to peft --base MODEL"


def _why_not_compared(base: ModelDir | None, why_no_base: str) -> str:
    kind = base.config.model_type if base is not None and base.config is not None else None
    return (
        why_no_base if base is None else f"lora-tool has no table of the modules of a {kind or 'model without a type'}"
    )


def _constant(head: ValueHead) -> str:
    without = (
        f", without its bias: every reward is {head.constant:.9g} lower than the value head's" if head.constant else ""
    )
    return f"the score head comes from {head.name}{without}"


def _judged(adapter: AdapterDir, named: PeftNames, judge: Judge) -> Report:
    """Return the rules' findings in the adapter once its tensors have their new names."""
    tensors = {}
    for new, tensor in named.tensors.items():
        tensors[new] = tensor if new == tensor.name else replace(tensor, spec=replace(tensor.spec, name=new))
    renamed = replace(
        adapter,
        config=named.config,
        weights=replace(adapter.weights, tensors=tensors),
        keys={name: keys.parse(name) for name in tensors},
    )
    return replace(judge, deep=False).folder(judge.subject(renamed))


def renamed_steps(named: PeftNames) -> Iterator[Step]:
    """Yield the steps that write an adapter's tensors under these names."""
    for new, tensor in named.tensors.items():
        op = copied_as(tensor.dtype, tensor)
        reason = "copied" if new == tensor.name else f"renamed, saved as {tensor.name}"
        action = TensorAction.COPIED if op.is_copy else TensorAction.CAST
        yield Step(out=replace(tensor.spec, name=new), op=op, action=action, reason=reason)


def _beside(adapter: AdapterDir) -> Iterator[SideFile]:
    folder = adapter.folder
    for name in dict.fromkeys((*folder.tokenizer_files, *folder.licence_files, *_CARD)):
        if name in folder.files:
            yield copied_file(folder.root, name, folder.root)
    for name in folder.templates:
        yield copied_file(folder.root, name, folder.root)


_CARD = ("README.md",)


# The value head of a reward model that was trained on a causal LM, as the score head of a sequence classifier.
#
# LLaMA-Factory and TRL's PPO put a linear layer with one output, ``v_head.summary``, on the last hidden state of a causal
# LM, and save it in a file next to the adapter's. The classifier that transformers has for the same model puts `score` on
# the same hidden state, without a bias: its rewards are those of the value head minus one constant, which changes no
# comparison.


_FILES = (VALUE_HEAD, "value_head.bin")
_WEIGHT, _BIAS = "v_head.summary.weight", "v_head.summary.bias"
_SCORE = "score"
_TASK = "SEQ_CLS"
_GIVE_BASE = "give the model that it was trained on: --base MODEL"


class ValueHead(Struct, frozen=True, kw_only=True):
    """The value head in an adapter's folder. `constant` is its bias; without it every reward is lower by that much."""

    weights: Weights
    weight: StoredTensor
    constant: float

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.weight.path.name


def value_head_of(adapter: AdapterDir) -> ValueHead:
    """Return the value head in an adapter's folder.

    Raises `UnsupportedAdapter` if there is none or it has another form; `CorruptFile` if it cannot be read.
    """
    name = next((name for name in _FILES if name in adapter.folder.files), None)
    if name is None:
        raise UnsupportedAdapter(
            f"{adapter.root} has no value head: neither {' nor '.join(_FILES)} lies beside the adapter",
            hint=f"lora-tool validate {shlex.quote(str(adapter.root))} --rm",
        )
    weights = read_single(adapter.root / name)
    for problem in weights.problems:
        if problem.fatal:
            raise CorruptFile(problem)
    tensors = weights.tensors
    weight, bias = tensors.get(_WEIGHT), tensors.get(_BIAS)
    form = weight is not None and len(weight.shape) == len((1, "hidden")) and weight.shape[0] == 1
    if weight is None or not form or tensors.keys() > {_WEIGHT, _BIAS} or not weight.dtype.is_float:
        found = ", ".join(f"{each.name} {list(each.shape)}" for each in tensors.values()) or "nothing"
        raise UnsupportedAdapter(
            f"{adapter.root / name}: expected {_WEIGHT} of shape [1, hidden size] and {_BIAS}, found {found[:200]}",
            hint="use the value head with the program that trained it",
        )
    return ValueHead(weights=weights, weight=weight, constant=0.0 if bias is None else _value(bias))


def with_score(named: PeftNames, head: ValueHead, adapter: AdapterDir, base: ModelDir | None) -> PeftNames:
    """Return the adapter as one of the sequence classifier of its base, with the value head as its score head.

    Raises `UnsupportedAdapter` where that class is not known to put `score` on the hidden state that the causal LM has,
    or the adapter changes a module that it does not have.
    """
    config = base.config if base is not None else None
    if base is None or config is None:
        raise UnsupportedAdapter(
            f"{adapter.root}: the base is not at hand, so lora-tool cannot tell whether it has a classifier with a score head",
            hint=_GIVE_BASE,
        )
    arch = architecture_of(config.model_type or "")
    if arch is None or arch.head != _SCORE or arch.causal_lm is None or config.custom_code:
        raise UnsupportedAdapter(
            f"{base.root}: lora-tool knows no classifier of a {config.model_type or 'model without a type'} that puts a linear "
            "layer without a bias on the hidden state of its causal LM",
            hint="use the value head with the program that trained it",
        )
    hidden = config.raw.get("hidden_size")
    if isinstance(hidden, int) and hidden != head.weight.shape[1]:
        raise UnsupportedAdapter(
            f"{head.weight.path}: `{_WEIGHT}` has {head.weight.shape[1]} columns, but the hidden size of {base.root} is {hidden}",
            hint=_GIVE_BASE,
        )
    output = next((name for name in named.tensors if is_output(parse(name).module)), None)
    if output is not None:
        raise UnsupportedAdapter(
            f"`{output}`: the adapter changes the output layer, which a classifier does not have",
            hint="to convert the policy with its output layer, leave out `reward=True`",
        )
    saved = tuple(dict.fromkeys((*named.config.modules_to_save, _SCORE)))
    changes: Mapping[str, object] = {"task_type": _TASK, "modules_to_save": list(saved)}
    return replace(
        named,
        tensors={**named.tensors, f"{PREFIX}{_SCORE}.weight": head.weight},
        config=replace(named.config, task_type=_TASK, modules_to_save=saved),
        changes={**named.changes, **changes},
        why=(*named.why, f"task_type {_TASK} and {_SCORE} in modules_to_save"),
    )


def _value(bias: StoredTensor) -> float:
    """Return the one value of a bias."""
    data = read_part(bias, 0, bias.nbytes)
    if bias.spec.numel == 1 and bias.dtype is DType.BF16:
        data, form = b"\0\0" + data, "<f"
    else:
        form = {DType.F32: "<f", DType.F16: "<e", DType.F64: "<d"}.get(bias.dtype, "")
    if bias.spec.numel != 1 or not form:
        raise UnsupportedAdapter(
            f"{bias.path}: `{bias.name}` is {bias.dtype} {list(bias.shape)}, expected one float",
            hint="use the value head with the program that trained it",
        )
    (value,) = struct.unpack(form, data)
    return float(value)

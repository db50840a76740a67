"""The value head of a reward model that was trained on a causal LM, as the score head of a sequence classifier.

LLaMA-Factory and TRL's PPO put a linear layer with one output, ``v_head.summary``, on the last hidden state of a causal
LM, and save it in a file next to the adapter's. The classifier that transformers has for the same model puts `score` on
the same hidden state, without a bias: its rewards are those of the value head minus one constant, which changes no
comparison.
"""

from __future__ import annotations

import shlex
import struct
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import VALUE_HEAD, AdapterDir, ModelDir
from lora_tool.core.errors import CorruptFile, UnsupportedAdapter
from lora_tool.core.keys import PREFIX, parse
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.stored import read_part
from lora_tool.formats.weights import Weights, read_single
from lora_tool.models import architecture_of
from lora_tool.models.ends import is_output
from lora_tool.plans.convert.peft_names import PeftNames

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

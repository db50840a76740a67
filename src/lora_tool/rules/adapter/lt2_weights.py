"""LT208, LT209, LT219, LT227, LT228, LT220 and LT311: the values themselves. These rules read weights."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.adapters.experts import IN_EXPERT
from lora_tool.adapters.view import LAYER_PARTS, LoraLayer
from lora_tool.core.errors import BrokenFile
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.manifest import FILE_NAME, read_manifest
from lora_tool.formats.stored import read_part
from lora_tool.models.ends import MATRIX
from lora_tool.rules.adapter.lt3_head import head_weight, saved_heads
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, Subject, an_earlier_checkpoint

_MOST_RANKS = 1024
"""More processes than train an adapter."""
_ENOUGH = 8
"""A tensor of fewer values may have equal ones by chance."""

_ABSURD = 65536.0
"""From here on float16 overflows; no trained factor comes near."""
READ_PAST_LORA = (
    ".mixer.dt_proj",
    ".mamba.dt_proj",
    ".router.classifier",
    ".head.attention.out_proj",
    ".multihead_attn.out_proj",
)
"""Ends of the paths of layers that transformers never calls, but for the weight: of Mamba and Jamba, of SigLIP's pooling."""


_PARTLY = (
    "if they were meant to be trained, look whether their parameters were frozen or their outputs never used, and train "
    "again"
)


@rule("LT208", Severity.ERROR, on=AdapterSubject, needs={Need.LORA}, deep=True)
def never_moved(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter looks untrained: every lora_B is zero.

    What it does: Reads each layer's `lora_B` (for an embedding, its `lora_embedding_A`), which is zero before training.
    It is an error if all are zero, a warning if half of them or more are, single experts aside, and else info. It is an
    error, too, if every layer has a factor of zeros, whichever of the two it is.
    Why it matters: With B = 0 the adapter changes nothing, and the merged model equals the base. The run did not train:
    its learning rate was 0, its parameters were frozen, all gradients were zero, or it saved before the first step. A
    single zero B belongs to a module without a gradient, such as an expert that no token reached.
    Example: A GRPO run in which all rewards were equal ends with loss 0 and such an adapter.
    What to do: Look at `grad_norm` and `loss` in `trainer_state.json`, and train again.
    """
    read, zero = 0, []
    for layer in subject.layers:
        tensor = layer.zero_initialised
        if tensor is not None and tensor.dtype.is_float and tensor.spec.numel:
            read += 1
            if subject.scan(tensor).all_zero:
                zero.append((layer, tensor))
    if zero and len(zero) == read:
        yield Fault(message=f"all {len(zero)} lora_B are zero, as before training, so the adapter changes nothing")
        return
    if subject.layers and all(_without_delta(subject, layer) for layer in subject.layers):
        message = f"in all {len(subject.layers)} modules lora_A or lora_B is zero, so the adapter changes nothing"
        yield Fault(message=message)
        return
    experts = [each for each in zero if IN_EXPERT.search(each[0].target)]
    others = [each for each in zero if each not in experts and not _is_read_past(subject, each[0])]
    dense = read - sum(IN_EXPERT.search(layer.target) is not None for layer in subject.layers)
    most = 2 * len(others) >= dense and not _has_filled_in(subject)
    for found, severity in ((others, None if most else Severity.INFO), (experts, Severity.INFO)):
        if found:
            more = f", and so {_are(len(found) - 1)} of the adapter's {read}" if found[1:] else ""
            message = f"is all zero{more}: {'these modules were' if found[1:] else 'this module was'} not trained"
            yield Fault(subject=found[0][1].name, message=message, severity=severity or Severity.WARNING, hint=_PARTLY)


def _has_filled_in(subject: AdapterSubject) -> bool:
    """Return whether lora-tool computed the adapter, which adds LoRA of zeros where a server wants it or nothing changed."""
    if FILE_NAME not in subject.checkpoint.folder.files:
        return False
    try:
        return read_manifest(subject.checkpoint.root / FILE_NAME).raw.get("operation") != "consolidate"
    except BrokenFile:
        return False


def _are(count: int) -> str:
    return f"are {count} more" if count > 1 else "is one more"


def _is_read_past(subject: AdapterSubject, layer: LoraLayer) -> bool:
    """Return whether the model never calls the layer; PEFT calls the `out_proj` of an attention that it wraps whole."""
    wrapped = {each.target for each in subject.layers}
    return f".{layer.target}".endswith(READ_PAST_LORA) and layer.target.rpartition(".")[0] not in wrapped


def _without_delta(subject: AdapterSubject, layer: LoraLayer) -> bool:
    """Return whether a factor of the layer is all zero, and with it ΔW."""
    for factor in layer.factors:
        if factor.dtype.is_float and factor.spec.numel and subject.scan(factor).all_zero:
            return True
    return False


@rule("LT227", Severity.ERROR, on=AdapterSubject, needs={Need.LORA}, deep=True)
def one_ranks_part(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter holds the rows of only one rank.

    What it does: Checks whether every `lora_B` is zero except for the rows that one rank of N would hold, with the same
    rank and N in all modules.
    Why it matters: Under FSDP each rank holds some rows of a matrix. A rank that saves without a gather, or loads its
    own part into a fresh adapter, saves only its own rows: the rest of every module is untrained.
    Example: After training on 8 GPUs, in all 224 modules only rows 0 to 511 of the 4,096 in `lora_B` are not zero.
    What to do: Save the adapter again from the sharded training checkpoint: `lora-tool consolidate CHECKPOINT`.
    """
    factors = [layer.b for layer in subject.layers if layer.b is not None and len(layer.b.shape) == MATRIX]
    parts: set[tuple[int, int]] = set()  # how many ranks and which of them, as far as all factors agree
    for factor in factors:
        rows, held = factor.shape[0], _rows_between_zeros(factor)
        if len(held) in (0, rows):
            return
        known = parts or {(ranks, held.start // -(-rows // ranks)) for ranks in range(2, _MOST_RANKS + 1)}
        parts = {part for part in known if held == _rows_of(part, rows)}
        if not parts:
            return
    if len(factors) > 1:
        (ranks, rank), first = min(parts), factors[0]
        kept = _rows_of((ranks, rank), first.shape[0])
        message = (
            f"only rows {kept.start:,} to {kept.stop - 1:,} of {first.shape[0]:,} are not zero, as in all "
            f"{len(factors)} lora_B: they are the part of rank {rank} of {ranks}"
        )
        yield Fault(subject=first.name, message=message)


def _rows_of(part: tuple[int, int], rows: int) -> range:
    """Return the rows that FSDP gives a rank (torch.chunk): as many to each, fewer to the last ones."""
    ranks, rank = part
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def _rows_between_zeros(factor: StoredTensor) -> range:
    """Return the rows from the first to the last that is not all zero; most factors begin and end with such rows, and of
    those nothing else is read.
    """
    rows = factor.shape[0]
    row_bytes = factor.nbytes // rows if rows else 0
    if not row_bytes:
        return range(rows)
    first, last = read_part(factor, 0, row_bytes), read_part(factor, (rows - 1) * row_bytes, row_bytes)
    if first.strip(b"\0") and last.strip(b"\0"):
        return range(rows)
    data = read_part(factor, 0, factor.nbytes)
    return range((len(data) - len(data.lstrip(b"\0"))) // row_bytes, -(-len(data.rstrip(b"\0")) // row_bytes))


@rule("LT228", Severity.WARNING, on=AdapterSubject, needs={Need.LORA}, deep=True)
def read_past(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on a layer whose LoRA the model never applies.

    What it does: Looks for LoRA on layers that transformers does not call: it multiplies with their weight itself. These
    are `dt_proj` of Mamba, Falcon Mamba and Jamba, the router of LongCat Flash, and `out_proj` of the attention that pools
    SigLIP's output and of Aria's projector. LoRA that is zero is reported as info.
    Why it matters: Their LoRA has no gradient, so training leaves it as it began, and no effect in the unmerged model. The
    merged weight has its ΔW, so the merged model is not the one that was trained unless ΔW is zero.
    Example: `init_lora_weights="pissa"` took the largest part of `mixer.dt_proj` out of the base, and training ran
    without it.
    What to do: Leave the layer out of `target_modules` when you train.
    """
    for layer in subject.layers:
        if not _is_read_past(subject, layer):
            continue
        text = f"the model reads the weight of `{layer.target}` past its LoRA, which training cannot change"
        if _without_delta(subject, layer):
            yield Fault(subject=layer.any_tensor.name, message=text, severity=Severity.INFO)
        else:
            message = f"{text}: the merged model has this ΔW, and the unmerged one does not"
            yield Fault(subject=layer.any_tensor.name, message=message)


@rule("LT209", Severity.ERROR, on=Subject, deep=True)
def not_finite(subject: Subject) -> Iterator[Fault]:
    """NaN or infinity in the weights.

    What it does: Reads every value of the F16, BF16, F32 and F64 tensors, and every code and scale of 8-bit floats.
    Why it matters: NaN spreads to every output; or worse, it does not: under SDPA one NaN in a `q_proj` gave a finite,
    wrong score. PEFT and transformers load and merge it silently.
    Example: A reward model trained in fp16 overflowed; its log shows loss 0.0, because the Trainer filters NaN there.
    What to do: Use an earlier checkpoint; train in bf16, or with gradient clipping and a smaller learning rate.
    """
    for tensor in subject.tensors.values():
        found = subject.scan(tensor)
        if found.nonfinite:
            counts = (
                f"{found.nonfinite:,} of {tensor.spec.numel:,} values are NaN or infinite, first at {found.first:,}"
            )
            hint = an_earlier_checkpoint(subject, "train in bf16, or with a smaller learning rate")
            yield Fault(subject=tensor.name, message=counts, path=tensor.path, hint=hint)


@rule("LT219", Severity.WARNING, on=AdapterSubject, needs={Need.LORA}, deep=True)
def constant(subject: AdapterSubject) -> Iterator[Fault]:
    """A factor whose values are all equal.

    What it does: Looks for every `lora_A` and `lora_B` that holds a single value throughout. LT208 covers a `lora_B` of
    zeros.
    Why it matters: Training never ends like this. The values were lost and filled in, by a broken conversion, a
    placeholder or uninitialised memory. An A of zeros makes its module do nothing; a constant B adds the same number to
    every output.
    Example: Every value of `…q_proj.lora_A.weight` is 0.
    What to do: Save the adapter again from the training state, or use another checkpoint.
    """
    for layer in subject.layers:
        for tensor in layer.factors:
            if not tensor.dtype.is_float or tensor.spec.numel < _ENOUGH:
                continue
            found = subject.scan(tensor)
            if found.constant or (found.all_zero and tensor is not layer.zero_initialised):
                value = "zero" if found.all_zero else "the same"
                message = f"all {tensor.spec.numel:,} values are {value}, which training never produces"
                yield Fault(subject=tensor.name, message=message)


@rule("LT220", Severity.WARNING, on=AdapterSubject, deep=True)
def absurd(subject: AdapterSubject) -> Iterator[Fault]:
    """Values far larger than training produces.

    What it does: Looks for values of 512 or more in factors and saved modules; trained values stay below about 1.
    Values from 65,536 on, where float16 overflows, are an error.
    Why it matters: The run diverged, the bytes were read in the wrong type or order, or the file is damaged. The model
    answers with nonsense, or with NaN where 16-bit types overflow.
    Example: `lora_B` holds 3.4e+38, because the gradient of a step overflowed or one of its bits was flipped.
    What to do: Use an earlier checkpoint; `grad_norm` and `loss` in `trainer_state.json` show where the run diverged.
    If the original file is fine, copy it again.
    """
    for name, tensor in subject.tensors.items():
        part = subject.checkpoint.keys[name].part
        if part is not Part.PLAIN and (part not in LAYER_PARTS or name in subject.view.repeats):
            continue
        largest = subject.scan(tensor).largest
        if largest:
            severity = Severity.ERROR if largest >= _ABSURD else None
            yield Fault(subject=tensor.name, message=f"holds values up to {largest:.3g}", severity=severity)


@rule("LT311", Severity.ERROR, on=Subject, deep=True)
def zero_head(subject: Subject) -> Iterator[Fault]:
    """A head that is all zero.

    What it does: Reads `score.weight` or `classifier.weight` of an adapter or a model.
    Why it matters: A head of zeros gives every text the score 0, so every comparison is a tie, and nothing fails. The
    trained head was not saved, was read before its gather from the ranks, or got no gradient.
    Example: Every value of `base_model.model.score.weight` is 0, although the LoRA factors are trained.
    What to do: Look for the head in the training checkpoint (`lora-tool consolidate CHECKPOINT`), or take another
    checkpoint.
    """
    tensors = saved_heads(subject) if isinstance(subject, AdapterSubject) else subject.tensors
    head = head_weight(tensors)
    if head is None or not head.dtype.is_float or not head.spec.numel:
        return
    if subject.scan(head).all_zero:
        message = f"all {head.spec.numel:,} values of the head are zero, so the model gives every text the same score"
        yield Fault(subject=head.name, message=message)

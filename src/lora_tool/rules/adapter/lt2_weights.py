"""LT208, LT209, LT219, LT227, LT220 and LT311: the values themselves. These rules read weights."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.architectures.ends import MATRIX
from lora_tool.formats.stored import read_part
from lora_tool.keys import Part
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, Subject, an_earlier_checkpoint
from lora_tool.rules.shared.heads import head_weight, saved_heads
from lora_tool.tensors import StoredTensor

_MOST_RANKS = 1024
"""More processes than train an adapter."""
_ENOUGH = 8
"""A tensor of fewer values may have equal ones by chance."""

_ABSURD = 65536.0
"""From here on float16 overflows; no trained factor comes near."""


@rule("LT208", Severity.ERROR, on=AdapterSubject, needs={Need.LORA}, deep=True)
def never_moved(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter looks untrained: every lora_B is zero.

    What it does: Reads each layer's `lora_B` (of an embedding: its `lora_embedding_A`), which is zero before training.
    All of them being zero is an error, single ones are noted.

    Why it matters: With B = 0 the adapter changes nothing, and the merged model is the base. The run did not train: a
    learning rate of 0, frozen parameters, gradients that were all zero, or a save before the first step. A single zero
    B is a module that got no gradient, such as an expert that no token reached.

    Example: A GRPO run whose rewards were all equal ends with loss 0 and this adapter.

    What to do: Look at `grad_norm` and `loss` in `trainer_state.json`, and train again.
    """
    factors = [layer.zero_initialised for layer in subject.layers]
    read = [tensor for tensor in factors if tensor is not None and tensor.dtype.is_float and tensor.spec.numel]
    zero = [tensor for tensor in read if subject.scan(tensor).all_zero]
    if zero and len(zero) == len(read):
        yield Fault(message=f"all {len(zero)} lora_B are zero, as before training: the adapter changes nothing")
        return
    for tensor in zero:
        message = "is all zero: this module was not trained"
        yield Fault(subject=tensor.name, message=message, severity=Severity.INFO)


@rule("LT227", Severity.ERROR, on=AdapterSubject, needs={Need.LORA}, deep=True)
def one_ranks_part(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter holds the rows of only one rank.

    What it does: Looks whether every `lora_B` is zero but for the rows that one rank of N would hold, the same rank of
    the same N in all modules.

    Why it matters: Under FSDP each rank holds some rows of a matrix. One that saves without gathering, or loads its own
    part into a fresh adapter, keeps what it has: the rest of every module is as before training.

    Example: In all 224 modules only rows 0 to 511 of 4,096 in `lora_B` are not zero, after training on 8 GPUs.

    What to do: Save it from the training state again: `lora-tool consolidate CHECKPOINT`, of a sharded checkpoint.
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
            f"only rows {kept.start:,} to {kept.stop - 1:,} of {first.shape[0]:,} are not zero, and so it is in all "
            f"{len(factors)} lora_B: the part of rank {rank} of {ranks}"
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
    ends = (read_part(factor, at * row_bytes, row_bytes) for at in (0, rows - 1)) if row_bytes else ()
    if all(end.strip(b"\0") for end in ends):
        return range(rows)
    data = read_part(factor, 0, factor.nbytes)
    return range((len(data) - len(data.lstrip(b"\0"))) // row_bytes, -(-len(data.rstrip(b"\0")) // row_bytes))


@rule("LT209", Severity.ERROR, on=Subject, deep=True)
def not_finite(subject: Subject) -> Iterator[Fault]:
    """NaN or infinity in the weights.

    What it does: Reads every value of the F16, BF16, F32 and F64 tensors.

    Why it matters: NaN spreads to every output; or, worse, it does not: under SDPA one NaN in a `q_proj` gave a finite,
    wrong score. PEFT and transformers load and merge it without a word.

    Example: A reward model trained in fp16 overflowed; the log shows loss 0.0, because NaN is filtered there.

    What to do: Use an earlier checkpoint; train in bf16, or with gradient clipping and a smaller learning rate.
    """
    for tensor in subject.tensors.values():
        found = subject.scan(tensor)
        if found.nonfinite:
            counts = (
                f"{found.nonfinite:,} of {tensor.spec.numel:,} values are NaN or infinite, first at {found.first:,}"
            )
            hint = an_earlier_checkpoint(subject, "train in bf16, or with a smaller learning rate")
            yield Fault(subject=tensor.name, message=counts, path=str(tensor.path), hint=hint)


@rule("LT219", Severity.WARNING, on=AdapterSubject, needs={Need.LORA}, deep=True)
def constant(subject: AdapterSubject) -> Iterator[Fault]:
    """A factor whose values are all the same.

    What it does: Looks for each `lora_A` and `lora_B` with one value throughout. A `lora_B` of zeros is LT208's.

    Why it matters: No training ends so: the values were lost and filled in, as by a broken conversion, a placeholder,
    or memory that was never written. An A of zeros makes its module do nothing; another constant adds the same to each
    output.

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
                message = f"all {tensor.spec.numel:,} values are {value}: not what training gives"
                yield Fault(subject=tensor.name, message=message)


@rule("LT220", Severity.WARNING, on=AdapterSubject, deep=True)
def absurd(subject: AdapterSubject) -> Iterator[Fault]:
    """Values far beyond what training gives.

    What it does: Looks for values of 512 or more in factors and saved modules; trained ones stay below about 1. From
    65,536 on, where float16 ends, it is an error.

    Why it matters: Larger by thousands are a run that diverged, bytes read in the wrong type or order, or a damaged
    file: the model answers with nonsense, or with NaN where 16 bits overflow.

    Example: `lora_B` holds 3.4e+38 after a step whose gradient overflowed; or one bit of it was flipped.

    What to do: Use an earlier checkpoint; look at `grad_norm` and `loss` in `trainer_state.json` before this one. Copy
    the file again if the values were good where it was made.
    """
    factors = [tensor for layer in subject.layers for tensor in layer.parts.values()]
    plain = [item.tensor for item in subject.view.parts(Part.PLAIN)]
    for tensor in (*factors, *plain):
        largest = subject.scan(tensor).largest
        if largest:
            severity = Severity.ERROR if largest >= _ABSURD else None
            yield Fault(subject=tensor.name, message=f"holds values up to {largest:.3g}", severity=severity)


@rule("LT311", Severity.ERROR, on=Subject, deep=True)
def zero_head(subject: Subject) -> Iterator[Fault]:
    """A head that is all zero.

    What it does: Reads `score.weight` or `classifier.weight`, of an adapter or a model.

    Why it matters: A head of zeros gives every text the score 0, so every comparison is a tie, and nothing fails. The
    trained head was not saved, was read before it was gathered from its ranks, or got no gradient.

    Example: Every value of `base_model.model.score.weight` is 0, beside trained factors.

    What to do: Look for the head in the training checkpoint (`lora-tool consolidate`), or take another checkpoint.
    """
    tensors = saved_heads(subject) if isinstance(subject, AdapterSubject) else subject.tensors
    head = head_weight(tensors)
    if head is None or not head.dtype.is_float or not head.spec.numel:
        return
    if subject.scan(head).all_zero:
        message = f"all {head.spec.numel:,} values of the head are zero: the model gives every text the same score"
        yield Fault(subject=head.name, message=message)

"""Changes that are of low rank only together with the base: PiSSA's and OLoRA's inits, and rows trained whole.

PiSSA and OLoRA take a product P out of W before training, so that the change of W is s·B·A - P (Meng et al., 2024;
Büyükakyüz, 2024): P's factors added to the others give it at rank 2r. Rows of an embedding or output layer that were
trained as tokens, or saved whole, differ from the base's in a few rows; the difference is a product of those rows
and of rows of the unit matrix, at a rank that is their number.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.core.tensors import StoredTensor
from lora_tool.models.ends import MATRIX, head_of, is_end, is_output, is_tied
from lora_tool.plans.algebra.ranks import ModuleRank
from lora_tool.plans.algebra.spool import Spool
from lora_tool.plans.algebra.terms import Factors, Term
from lora_tool.plans.core.operation import rows_of

if TYPE_CHECKING:
    import numpy.typing as npt


_MOST_ROWS = 512
"""More changed rows are not of low rank: no server takes a rank above this."""
_BLOCK = 1 << 20


class ChangedRows(Struct, frozen=True, kw_only=True):
    """The rows of one end that are not the base's."""

    module: str
    tensor: StoredTensor
    """The adapter's tensor with only these rows, or with all rows."""
    places: tuple[int, ...]
    """Which rows of the base's weight they are."""
    base: StoredTensor

    @property
    def rows(self) -> tuple[int, ...]:
        """Which rows of `tensor` they are."""
        return self.places if self.tensor.shape[0] == self.base.shape[0] else tuple(range(len(self.places)))


def base_weight(base: ModelDir, module: str) -> StoredTensor:
    """Return the weight of a module, a matrix of floats. Raises `IncompatibleBase` where the base has none."""
    tensor = as_matrices(base).tensors.get(f"{module}.weight")
    if tensor is None or len(tensor.shape) != MATRIX or not tensor.dtype.is_float:
        raise IncompatibleBase(
            f"{base.root} has no matrix `{module}.weight`, which the adapter changes",
            hint="give the model that the adapter was trained on, as it is on the disk: `base=MODEL`",
        )
    return tensor


def without_init(factors: Factors, weight: StoredTensor, init: str, spool: Spool, *, transposed: bool) -> Factors:
    """Return s·B·A - P: the change of W, from which `init` subtracted P before training.

    W is `weight`, stored [in, out] where `transposed`. Raises `IncompatibleBase` where the sizes differ.
    """
    (term,) = factors.terms
    shape = weight.shape[::-1] if transposed else weight.shape
    if shape != (factors.out, factors.width):
        raise IncompatibleBase(
            f"`{factors.module}` is {list(shape)} in {weight.path.parent}, [{factors.out}, {factors.width}] in the adapter"
        )
    from lora_tool.formats.stored_numbers import numbers  # numpy, only where values are read

    whole = numbers(weight)
    left, right = taken_out(init, whole.T if transposed else whole, term.rank, term.scale)
    b, a = (spool.add(f"{factors.module}.{init}_{part}", each) for part, each in (("B", left), ("A", right)))
    return replace(factors, terms=(term, Term(a=a, b=b, scale=-1.0)))


def taken_out(
    init: str, weight: npt.NDArray[Any], rank: int, scaling: float
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return P, [out, r] and [r, in]: what the init takes out of a float64 W (peft 0.21, `pissa_init`, `olora_init`).

    Raises `UnsupportedAdapter` where W holds NaN or infinity.
    """
    import numpy as np  # numpy, only where values are read

    if not np.isfinite(weight).all():
        raise UnsupportedAdapter(
            f"a weight of the base holds NaN or infinity, so what {init} took out cannot be computed"
        )
    if init == "pissa":
        left, values, right = np.linalg.svd(weight, full_matrices=False)
        roots = np.sqrt(values[:rank])
        return left[:, :rank] * roots, roots[:, None] * right[:rank]
    basis, inside = np.linalg.qr(weight)
    return scaling * basis[:, :rank], inside[:rank]


def rows_that_differ(view: AdapterView, base: ModelDir) -> Iterator[ChangedRows]:
    """Yield where the embeddings and output layers of the adapter have other rows than the base's; all may be the same.

    Raises `UnsupportedAdapter` for rows that the base does not have, and for more changed ones than a rank can be.
    """
    for module, tokens in view.tokens.items():
        weight = base_weight(base, module)
        if tokens.rows.shape != (len(tokens.indices), weight.shape[1]):
            raise IncompatibleBase(
                f"{tokens.rows.path}: `{tokens.rows.name}` is {list(tokens.rows.shape)}, for {len(tokens.indices)} tokens of "
                f"{list(weight.shape)}",
                hint="give the model that the adapter was trained on: `base=MODEL`",
            )
        _require_rows(weight, max(tokens.indices, default=-1) + 1, module, view.adapter.root)
        yield ChangedRows(module=module, tensor=tokens.rows, places=tokens.indices, base=weight)
    for item in view.parts(Part.PLAIN, Part.SAVED_MODULE):
        if item.tensor.name in view.repeats or not is_end(item.module) or head_of(item.module):
            continue
        if is_output(item.module) and is_tied(base) and f"{item.module}.weight" not in base.tensors:
            raise UnsupportedAdapter(
                f"{item.tensor.path}: `{item.tensor.name}` was trained whole, but {base.root} uses its embedding as its output "
                "layer: there is no other matrix that it could be LoRA on",
                hint=f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}",
            )
        weight = base_weight(base, item.module)
        if item.leaf != "weight" or item.tensor.shape[1:] != weight.shape[1:]:
            raise UnsupportedAdapter(f"{item.tensor.path}: `{item.tensor.name}` was trained whole, and is not LoRA")
        _require_rows(weight, item.tensor.shape[0], item.module, view.adapter.root)
        places = tuple(_other_rows(item.tensor, weight))
        if len(places) > _MOST_ROWS:
            raise UnsupportedAdapter(
                f"{item.tensor.path}: {len(places)} rows of `{item.tensor.name}` differ from the base's, but servers take LoRA only up to rank {_MOST_ROWS}",
                hint=f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}",
            )
        yield ChangedRows(module=item.module, tensor=item.tensor, places=places, base=weight)


def factors_of_rows(changed: ChangedRows, spool: Spool) -> Factors:
    """Return the change of the rows as LoRA: an embedding's A, and an output layer's B, are rows of the unit matrix."""
    import numpy as np

    from lora_tool.formats.stored_numbers import numbers

    ours, theirs = (
        np.concatenate([numbers(rows_of(tensor, row, 1)) for row in rows])
        for tensor, rows in ((changed.tensor, changed.rows), (changed.base, changed.places))
    )
    count, vocabulary = len(changed.places), changed.base.shape[0]
    chosen = np.zeros((count, vocabulary), np.float32)
    chosen[np.arange(count), changed.places] = 1
    embedding = not is_output(changed.module)
    a, b = (chosen, (ours - theirs).T) if embedding else (ours - theirs, chosen.T)
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        raise UnsupportedAdapter(f"{changed.tensor.path}: `{changed.tensor.name}` or the base's holds NaN or infinity")
    stored = [spool.add(f"{changed.module}.rows_{part}", each) for part, each in (("A", a), ("B", b))]
    term = Term(a=stored[0], b=stored[1], scale=1.0)
    return Factors(module=changed.module, terms=(term,), embedding=embedding, inner=(a.shape[1],), outer=())


def _require_rows(weight: StoredTensor, count: int, module: str, root: Path) -> None:
    if count > weight.shape[0]:
        raise UnsupportedAdapter(
            f"`{module}` has {count} rows in the adapter and {weight.shape[0]} in {weight.path.parent}: the vocabulary grew, and "
            "a server that loads the base has no such rows",
            hint=f"give the base with its embeddings resized as in training, or merge: lora-tool merge {shlex.quote(str(root))}",
        )


def _other_rows(tensor: StoredTensor, weight: StoredTensor) -> Iterator[int]:
    """Yield the rows in which two matrices have other values."""
    import numpy as np

    from lora_tool.formats.stored_numbers import numbers

    step = max(1, _BLOCK // max(1, weight.shape[1]))
    for at in range(0, tensor.shape[0], step):
        some = min(step, tensor.shape[0] - at)
        ours, theirs = (numbers(rows_of(each, at, some)) for each in (tensor, weight))
        yield from (at + int(row) for row in np.flatnonzero((ours != theirs).any(axis=1)))


_BLOCK = 1 << 19


def nearest_to_dora(
    factors: Factors, magnitude: StoredTensor, weight: StoredTensor, spool: Spool, *, rank: int
) -> tuple[Factors, ModuleRank]:
    """Return the product of `rank` at most that is nearest to what DoRA changes, and how near that is.

    `weight` is W, [out, in]. Raises `IncompatibleBase` where sizes differ, `UnsupportedAdapter` for NaN and infinity.
    """
    import numpy as np  # numpy, only where values are read

    from lora_tool.formats.stored_numbers import numbers
    from lora_tool.plans.algebra.krylov import nearest_to

    (term,) = factors.terms
    if weight.shape != (factors.out, factors.width) or magnitude.spec.numel != factors.out:
        raise IncompatibleBase(
            f"`{factors.module}` is {list(weight.shape)} in {weight.path.parent}, [{factors.out}, {factors.width}] in the adapter",
            hint="lora-tool cannot approximate DoRA on a layer that is stored [in, out]; merge it: "
            f"lora-tool merge {shlex.quote(str(term.a.path.parent))}",
        )
    left, right = numbers(term.b) * term.scale, numbers(term.a)
    sizes = numbers(magnitude).reshape(-1)
    step = max(1, _BLOCK // max(1, factors.width))

    def changes() -> Iterator[npt.NDArray[Any]]:
        for at in range(0, factors.out, step):
            some = slice(at, min(at + step, factors.out))
            before = numbers(rows_of(weight, at, some.stop - at))
            moved = before + left[some] @ right
            moved *= (sizes[some] / np.linalg.norm(moved, axis=1))[:, None]
            yield (moved - before).astype(np.float32)

    with np.errstate(all="ignore"):  # NaN and infinity are refused by name
        near = nearest_to(changes, weight.shape, f"{weight.path}: what DoRA makes of `{weight.name}`", rank=rank)
    a, b = (spool.add(f"{factors.module}.dora_{part}", each) for part, each in (("A", near.a), ("B", near.b)))
    figures = ModuleRank(
        module=factors.module,
        before=min(weight.shape),
        after=near.rank,
        energy=near.norm**2,
        discarded=near.residual**2,
        largest=near.largest,
        enough=near.enough or min(weight.shape),
    )
    return replace(factors, terms=(Term(a=a, b=b, scale=1.0),)), figures

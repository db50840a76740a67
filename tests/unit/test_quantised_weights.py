"""Quantised weights are the numbers that their own libraries make of them, bit for bit, by both formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.formats.quantised.parts import LayoutError
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.stored import read_part
from lora_tool.tensors import DType, StoredTensor
from lora_tool.verification.elements import Files
from tests.quantised_samples import KEPT, config_of

ALL = scan_file(KEPT).tensors
NAMES = sorted({name.partition("|")[0] for name in ALL})


def stored(sample: str) -> dict[str, StoredTensor]:
    """Return the tensors of a sample under the names of a checkpoint."""
    found = {}
    for name, tensor in ALL.items():
        of, _, own = name.partition("|")
        if of == sample and own != "expected":
            spec = type(tensor.spec)(name=own, dtype=tensor.dtype, shape=tensor.shape)
            found[own] = StoredTensor(spec=spec, spans=tensor.spans)
    return found


def expected(sample: str) -> StoredTensor:
    return ALL[f"{sample}|expected"]


def as_dtype(raw: bytes, tensor: StoredTensor, wanted: StoredTensor) -> np.ndarray[Any, Any]:
    """Return values rounded to the type of the library's: some of ours are float32 until ΔW is added."""
    from lora_tool.execution.kernels import STORAGE

    return np.frombuffer(raw, STORAGE[tensor.dtype]).astype(STORAGE[wanted.dtype]).reshape(tensor.shape)


@pytest.mark.parametrize("sample", NAMES)
def test_both_formulas_give_the_bits_of_the_library(sample: str) -> None:
    (encoding,) = read_quantised(stored(sample), config_of(sample)).weights.values()
    tensor, wanted = dequantised(encoding), expected(sample)
    assert encoding.spec.name == "m.weight"
    assert tensor.shape == wanted.shape
    library = as_dtype(read_part(wanted, 0, wanted.nbytes), wanted, wanted)
    assert as_dtype(read_part(tensor, 0, tensor.nbytes), tensor, wanted).tobytes() == library.tobytes()
    with Files() as files:
        again = files.read(tensor, 0, tensor.nbytes).tobytes()
        some = files.rows(tensor, [(1, 3), (5, 6)]).tobytes()
    assert as_dtype(again, tensor, wanted).tobytes() == library.tobytes()
    row = tensor.nbytes // tensor.shape[0]
    assert some == again[row : 3 * row] + again[5 * row : 6 * row]
    # any part of it, whole rows or not
    for start, nbytes in ((0, row), (row, 2 * row), (row // 2, row), (tensor.nbytes - 2 * row, 2 * row)):
        assert read_part(tensor, start, nbytes) == again[start : start + nbytes]


def changed(sample: str, **changes: Any) -> dict[str, StoredTensor]:
    """Return a sample with some tensors left out (None), or of another type or shape in the header."""
    found = stored(sample)
    for name, change in changes.items():
        place = name.replace("__", ".")
        tensor = found.pop(place)
        if change is not None:
            dtype, shape = change
            spec = type(tensor.spec)(name=place, dtype=dtype, shape=shape)
            span = type(tensor.spans[0])(path=tensor.path, offset=0, nbytes=spec.nbytes)
            found[place] = StoredTensor(spec=spec, spans=(span,))
    return found


@pytest.mark.parametrize(
    ("sample", "changes", "words"),
    [
        ("fp8-block", {"m__weight_scale": None}, r"`m.weight` is F8_E4M3, and there is no scale for it"),
        ("fp8-block", {"m__weight": None}, r"`m.weight_scale` is a part of a quantised weight"),
        ("fp8-block", {"m__weight_scale": (DType.F32, (2, 3))}, r"is \[2, 3\] for .* expected \[3, 3\]"),
        ("fp8-block", {"m__weight": (DType.F8_E5M2, (36, 80))}, r"`m.weight` is F8_E5M2, and codes of that type"),
        ("fp8-block", {"m__weight_scale": (DType.I32, (3, 3))}, r"is I32; expected floats or powers of two"),
        (
            "bnb-nf4-double@bfloat16-12x64",
            {"m__weight": (DType.U8, (385, 1))},
            r"`m.weight` is \[12, 64\], 384 bytes; found: 385 bytes",
        ),
        ("bnb-nf4-double@bfloat16-12x64", {"m__weight__nested_absmax": None}, r"nested_absmax` is not there"),
        ("bnb-nf4-double@bfloat16-12x64", {"m__weight__absmax": (DType.U8, (13,))}, r"expected 12 elements"),
        ("bnb-int8", {"m__weight": None}, r"`m.SCB` .*`m.weight` is not there"),
        ("int4-group", {"m__weight_packed": (DType.I32, (20, 11))}, r"is \[20, 11\] for a weight of \[20, 96\]"),
        ("int4-group", {"m__weight_scale": (DType.BF16, (20, 5))}, r"is \[20, 5\] for a weight of \[20, 96\]"),
        ("int4-group", {"m__weight_packed": (DType.F32, (20, 12))}, r"is F32; expected I32 or U8"),
        ("nvfp4", {"m__weight_scale": (DType.F8_E4M3, (20, 3))}, r"expected one scale for each 16 values"),
        ("mxfp4", {"m__weight_scale": (DType.F32, (20, 3))}, r"is F32; expected F8_E8M0 or U8"),
    ],
)
def test_what_is_not_stored_as_its_format_says_is_named(sample: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        read_quantised(changed(sample, **changes), config_of(sample))

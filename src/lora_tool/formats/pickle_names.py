"""Which names in a pickle are those of checkpoints, and which a program that loads it would run for somebody else.

Nothing is run here, whatever the name. A name is judged as written, by three questions: is it among those that
checkpoints need, is it Python's own, and is what it calls a class, as far as its spelling tells? The classes of
trainers and of their users' code stand in training states in any number, so no list has them all; functions that
rebuild something are few. Lists of harmful names are always too short.

Sources: torch 2.13 `_utils.py`, `_weights_only_unpickler.py` (`_get_allowed_globals`), `jit/_pickle.py`; numpy 2.4
`_core/multiarray.py`, `random/_pickle.py`; the reductions in CPython's `copyreg.py`, `enum.py`, `re.py`, `datetime.py`.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_tool.core.display import some
from lora_tool.core.errors import Defect, Problem
from lora_tool.formats.pickle_objects import Global

_VALUES = (
    "bool bytearray bytes complex dict float frozenset int list long object range set slice str tuple type unicode "
    "xrange Ellipsis NotImplemented getattr"
)
_REDUCED = "__newobj__ __newobj_ex__ _reconstructor"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_OF_CHECKPOINTS: Mapping[str, str] = {
    # Python's values and containers
    "builtins": _VALUES,
    "__builtin__": _VALUES,
    "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
    "copyreg": _REDUCED,
    "copy_reg": _REDUCED,
    "_codecs": "encode",
    "_io": "BytesIO StringIO",
    "io": "BytesIO StringIO",
    "array": "array _array_reconstructor",
    "argparse": "Namespace",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "functools": "partial",
    "fractions": "Fraction",
    "ipaddress": "IPv4Address IPv6Address",
    "itertools": "count",
    "logging": "getLogger",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "random": "Random",
    "re": "_compile RegexFlag",
    "signal": "Signals",
    "types": "GenericAlias MappingProxyType NoneType SimpleNamespace UnionType",
    "typing": "Any Dict List Literal Optional Tuple Union",
    "uuid": "SafeUUID UUID",
    "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
    # what libraries do not spell as classes
    "torch": "device dtype layout memory_format",
    "torch.distributed.remote_device": "_remote_device",
    "torch.jit._pickle": "build_boollist build_doublelist build_intlist build_tensor_from_id build_tensorlist "
    "restore_type_tag",
    "torch.serialization": "_get_layout",
    "numpy": "dtype ndarray recarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}
"""Module → the names in it, beside classes outside of Python's own library, that checkpoints were seen to have."""
_FAMILIES = re.compile(
    r"torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type(_v2)?|torch\.(b?float|q?u?int|complex|bool)\w*"
    r"|numpy\.(u?int\d*|float\d+|complex\d+|bool_?|str_|bytes_|object_|void|u?longlong|half|single|double|u?int[cp])"
    r"|signal\.SIG[A-Z0-9]+|(\w+\.)+__pyx_unpickle_\w+"
)
"""Names of one kind: torch's functions around tensors and its types, numpy's scalar types, numbers of signals, and what
Cython makes for each of its classes."""
_OF_WEIGHTS = frozenset({"torch", "torchao", "numpy"})
"""The libraries whose classes are in files of weights."""
_RUNS = frozenset({"CDLL", "LibraryLoader", "OleDLL", "PackageImporter", "Popen", "PyDLL", "WinDLL"})
"""Classes that run something or load a library, in whatever module that imported one they are named."""
_CLASS = re.compile(r"_*[A-Z]\w*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def foreign(names: Mapping[Global, bool], *, weights: bool = False) -> tuple[str, ...]:
    """Return the names, as written, that no checkpoint needs, of those that a pickle has, each with whether it is
    called; functions first. Files of `weights` need less than training states, where any program's classes may stand.
    """
    found = (name for name, called in names.items() if _is_foreign(*name, called=called, weights=weights))
    return tuple(_written(*name) for name in sorted(found, key=lambda name: _is_class(name[1])))


def problems_of(path: Path, names: Mapping[Global, bool], *, weights: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with a file whose pickle has these `names`: at most one problem, with all `foreign` ones."""
    found = foreign(names, weights=weights)
    if found:
        more = f"; so are {some(found[1:])}" if len(found) > 1 else ""
        message = f"is called or imported when a program unpickles the file, and no checkpoint needs it{more}"
        yield Problem(defect=Defect.FOREIGN_CALL, path=str(path), message=message, subject=found[0], fatal=False)


def _is_foreign(module: str, name: str, *, called: bool, weights: bool) -> bool:
    qualified, (*outer, last) = f"{module}.{name}", name.split(".")
    if name in _OF_CHECKPOINTS.get(module, "").split() or _FAMILIES.fullmatch(qualified):
        return False
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or module in IMPORT_MAPPING:  # Python 2's names of its modules
        return True
    if not _NAME.fullmatch(qualified) or last in _RUNS or not all(map(_is_class, outer)):
        return True
    return (weights and top not in _OF_WEIGHTS) or (called and not _is_class(last))


def _is_class(name: str) -> bool:
    """Return whether the name is spelled as those of classes are, as far as it is the last of a path."""
    return _CLASS.fullmatch(name.rpartition(".")[2]) is not None


def _written(module: str, name: str) -> str:
    """Return the name as the pickle has it, short, and with escapes for letters that only look like others."""
    return ascii(f"{module}.{name}"[:100])[1:-1]

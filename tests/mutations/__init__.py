"""One small named injury per rule, done to a copy of a good fixture: the proof that each rule sees what it is for.

`MUTATIONS` maps a name, which begins with the code it must give, to the injury and the folder it is done to. Some
codes have more than one: the forms in which a disease is met. The injuries for the rules of ``rules/…/lt2_layers.py``
are in ``lt2_layers.py`` here, and so on.
"""

from importlib import import_module
from pkgutil import iter_modules

from tests.mutations.registry import (
    CAUSAL,
    CAUSAL_MERGED,
    FIXTURES,
    MERGED,
    MODEL,
    MUTATIONS,
    REWARD,
    RUN,
    SHARDED,
    Mutation,
    break_,
    copy_of,
    merged_in,
)

__all__ = [
    "CAUSAL",
    "CAUSAL_MERGED",
    "FIXTURES",
    "MERGED",
    "MODEL",
    "MUTATIONS",
    "REWARD",
    "RUN",
    "SHARDED",
    "Mutation",
    "break_",
    "copy_of",
    "merged_in",
]

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)  # which registers its injuries

"""Whether a base is stored as it is in memory, so that headers alone tell where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from lora_tool.architectures import Architecture, architecture_of
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import MissingDependency, UnsupportedAdapter
from lora_tool.formats.model_config import ModelConfig
from lora_tool.names.model import ModelFacts
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.side_files import model_dtype
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.plan.merge.tied_embeddings import embeddings, tied_copies, tied_ends
from lora_tool.plan.merge.unexpected_tensors import computed_buffers, looks_plain, names_are_known

_MAPPERS = ("torch", "transformers")
"""What says where parameters are on disk."""
_FULL_PRECISION = "give the full-precision model that it was made from: --base MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectBase:
    """A base that is stored as it is in memory: nothing to translate. `ConvertedBase` is the other kind."""

    base: ModelDir
    adapters: Sequence[AdapterDir]
    arch: Architecture
    task: Task
    facts: ModelFacts | None = None
    fresh: frozenset[str] = frozenset()
    leftovers: tuple[InputRecord, ...] = ()

    @property
    def freed(self) -> Mapping[str, str]:
        """Return what is tied to another tensor by the config's word alone: the second bias of BERT's kin."""
        ends = [name for name in self.arch.causal_only if name.endswith(".decoder.bias")]
        return {name: f"{name.removesuffix('.decoder.bias')}.bias" for name in ends}

    def parts_of_fused(
        self, modules: AdapterModules, precision: Precision
    ) -> tuple[AdapterModules, Mapping[str, tuple[LoraTerm, ...]]]:
        """Return the modules, and none that are a part of a fused parameter, in any precision."""
        del precision
        return modules, {}

    def on_disk(self, steps: Sequence[Step], per_expert: Mapping[str, tuple[LoraTerm, ...]]) -> tuple[Step, ...]:
        """Return the steps."""
        if per_expert:
            raise AssertionError("a plainly stored model has no fused parameters")
        return tuple(steps)


def direct_base(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, task: Task) -> DirectBase:
    """Return the inputs as they are, without the buffers that transformers does not load."""
    leftovers = tuple(computed_buffers(base))
    left = {item.name for item in leftovers}
    tensors = {name: tensor for name, tensor in base.tensors.items() if name not in left}
    return DirectBase(
        base=replace(base, weights=replace(base.weights, tensors=tensors)) if left else base,
        adapters=adapters,
        arch=arch,
        task=task,
        leftovers=leftovers,
    )


def must_ask(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, task: Task, *, exact: bool) -> bool:
    """Return whether transformers is to say which names of a plainly stored base its model has.

    No where the config has no sizes, of which it would build some other model. `exact` takes no name for the model's
    that only looks like one. Raises `MissingDependency` where transformers is to be asked and is not installed.
    """
    if config_of(base).vocab_size is None:
        return False
    classifier = task is not Task.CAUSAL_LM
    known = names_are_known(base, adapters, arch, classifier=classifier)
    doubtful = not known and (exact or not looks_plain(base, arch, classifier=classifier))
    doubtful = doubtful or _is_tied_under_one_name(base, arch)
    doubtful = doubtful or len(embeddings(base, arch)) > 1  # an encoder's and a decoder's may be one
    if doubtful:
        require_transformers()
    return doubtful


def _is_tied_under_one_name(base: ModelDir, arch: Architecture) -> bool:
    """Return whether the config ties the ends and the output layer is on disk: it may stand for the embeddings too."""
    held = base.tensors.keys() & set(arch.causal_only)
    return config_of(base).tie_word_embeddings is True and bool(held - tied_copies(base, arch, None).keys())


def config_of(base: ModelDir) -> ModelConfig:
    """Return the config, which a whole model has."""
    if base.config is None:
        raise AssertionError("a whole model has a config")
    return base.config


def require_full_precision(base: ModelDir) -> None:
    """Return unless the base's weights are quantised. Raises `UnsupportedAdapter`."""
    config = config_of(base)
    if config.quantization:
        raise UnsupportedAdapter(
            f"{config.path}: the base is quantised ({config.quantization}): merging into rounded weights is not exact",
            hint=_FULL_PRECISION,
        )
    quantised = next((t for t in base.tensors.values() if t.dtype.value.startswith(("F8_", "F6_", "F4"))), None)
    if quantised is not None:
        raise UnsupportedAdapter(
            f"{quantised.path}: `{quantised.name}` is {quantised.dtype}: the base is quantised", hint=_FULL_PRECISION
        )


def plainly_stored(base: ModelDir, adapters: Sequence[AdapterDir], task: Task) -> Architecture | None:
    """Return the row of the base's model type if names on disk are those in memory; None if transformers must tell.

    Raises `MissingDependency` where it must, and is not installed.
    """
    config = config_of(base)
    arch = architecture_of(config.model_type or "")
    known = {arch.causal_lm, arch.sequence_classification} - {None} if arch else set()
    plain = arch is not None and (not config.architectures or bool(known & set(config.architectures)))
    plain = plain and arch is not None and _has_class(arch, adapters, task) and model_dtype(base) not in arch.wide_in
    bare = any(adapter.config and adapter.config.target_parameters for adapter in adapters)
    if plain and not bare and arch is not None and all(_all_found(base, adapter, arch) for adapter in adapters):
        ends = tied_ends(base, arch, None, {})
        if ends is None or len(ends.candidates) <= 1:
            return arch  # else transformers knows which of several matrices with a row per token is tied
    if plain and not bare and not all(map(find_spec, _MAPPERS)):
        return arch  # what is wrong with the names is said by them
    require_transformers()
    return None


def require_transformers() -> None:
    """Return if torch and transformers are there to be asked for names. Raises `MissingDependency`."""
    for package in _MAPPERS:
        if find_spec(package) is None:
            raise MissingDependency(package, extra="merge")


def _has_class(arch: Architecture, adapters: Sequence[AdapterDir], task: Task) -> bool:
    """Return whether the row has the class that the merged model is to be of, as far as it was said."""
    told = {adapter.config.task_type for adapter in adapters if adapter.config}
    classifier = task in (Task.SEQ_CLS, Task.REWARD) or "SEQ_CLS" in told
    causal = task is Task.CAUSAL_LM or "CAUSAL_LM" in told
    return not (classifier and arch.sequence_classification is None) and not (causal and arch.causal_lm is None)


def _all_found(base: ModelDir, adapter: AdapterDir, arch: Architecture) -> bool:
    """Return whether every adapted module is on disk under its own name; heads may be new, output layers tied."""
    held = {name.rpartition(".")[0] for name in (*base.tensors, *arch.causal_only)}
    adapted = {key.module for key in adapter.keys.values()}
    head = arch.head or ""
    return all(module in held or module == head or module.startswith(f"{head}.") for module in adapted)

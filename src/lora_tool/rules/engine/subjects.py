"""The subjects that rules check: an opened folder, for an adapter with its view."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.adapters.targeting import trained_for
from lora_tool.adapters.view import AdapterView, HalfPair, LoraLayer, half_pair_in
from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, RunDir
from lora_tool.checkpoints.folders import is_called_save, renamed
from lora_tool.core.choices import Choice
from lora_tool.core.errors import Defect, Problem
from lora_tool.core.tensors import StoredTensor, TensorSpec, TensorTable
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.text_classes import TextClass, text_class_of
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.scan import Scans, WeightScan

if TYPE_CHECKING:
    from lora_tool.models.layers import OddTensor
    from lora_tool.models.model_tensors import ModelTensors

    AskClass = Callable[[ModelConfig, Mapping[str, tuple[int, ...]]], ModelTensors | str]


@enum.unique
class Server(Choice):
    """An inference server that serves an adapter unmerged."""

    PEFT = "peft"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    MLX = "mlx"


@enum.unique
class Matter(enum.Enum):
    """What some rules judge and most folders do not have."""

    LOG = "log"
    """The Trainer's log, of the save in this folder."""
    RUN = "run"
    """A run's saves, or one of them with its log."""
    SAVE = "save"
    """A folder with the name of a run's save."""
    DEVIATION = "deviation"
    """A compared tensor of a merged model that is not as planned, or holds little of ΔW."""


class Subject(Struct, frozen=True, kw_only=True, eq=False):
    """An opened folder of any kind. Its scans are kept, so that no weight is read twice."""

    checkpoint: Checkpoint
    scans: Scans = field(default_factory=Scans)
    whole: bool = False
    """Whether every byte is read, also of what rules compare by its beginning and its end."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems of the files that opening the folder found."""
        return self.checkpoint.problems

    @property
    def kind(self) -> str:
        """The kind of folder, in the words of reports."""
        return str(self.checkpoint.kind)

    @property
    def formats(self) -> tuple[str, ...]:
        """What quantised weights of the folder are stored as, in the words of reports."""
        return ()

    @property
    def home(self) -> str:
        """The path of a finding that names none: the weights file of an adapter, else the folder."""
        return str(self.checkpoint.root)

    @property
    def named(self) -> Mapping[str, str]:
        """Placeholder in the commands of the rules' pages → its value, quoted for the shell: `ADAPTER` and its path."""
        return {}

    @property
    def tensors(self) -> TensorTable:
        """The tensors whose headers were read; none for the folders of rank files."""
        return self.checkpoint.tensors if isinstance(self.checkpoint, AdapterDir | ModelDir) else {}

    @property
    def read_files(self) -> frozenset[Path]:
        """The files of weights that were read without a fatal problem."""
        files = self.checkpoint.weights.files if isinstance(self.checkpoint, AdapterDir | ModelDir) else ()
        return frozenset(file.path for file in files if not any(problem.fatal for problem in file.problems))

    @property
    def places(self) -> Iterator[Path]:
        """Its folder, and others that its files lie in."""
        root, tags = self.checkpoint.root, getattr(self.checkpoint, "rank_files", ())
        yield from dict.fromkeys((root, *(root / tag for tag in tags)))

    def has(self, matter: Matter | Defect) -> bool:
        """Return whether the folder has this, so that the rules about it have something to judge."""
        match matter:
            case Matter.LOG | Matter.RUN:
                return self.checkpoint.folder.trainer is not None
            case Matter.SAVE:
                return is_called_save(self.checkpoint.folder.name) or self.checkpoint.folder.is_in_progress
            case Matter.DEVIATION:
                return False
            case defect:
                return any(problem.defect is defect for problem in self.problems)

    def scan(self, tensor: StoredTensor) -> WeightScan:
        """Return the scan of the tensor's values, read the first time. Raises as `Scans.of`."""
        return self.scans.of(tensor, self.tensors)


class RunSubject(Subject, frozen=True, kw_only=True, eq=False):
    """A run folder without finished weights, and those of its checkpoints that could be opened."""

    checkpoint: RunDir
    inner: tuple[Checkpoint, ...] = ()

    def has(self, matter: Matter | Defect) -> bool:
        """See `Subject`; the logs and the names are those of its saves, which are judged by themselves."""
        return matter is Matter.RUN or (not isinstance(matter, Matter) and super().has(matter))


def fetched_again(subject: Subject, name: str) -> str:
    """Return how to get the file `name`, which is missing or broken, once more."""
    root, other = subject.checkpoint.root, renamed(subject.checkpoint.folder, name)
    if other is not None:
        return shlex.join(["mv", str(root / other), str(root / name)])
    if subject.checkpoint.folder.trainer is not None:
        return "copy the file from another checkpoint of the same run, or save the model again"
    return f"copy the file again, or download it: {shlex.join(['hf', 'download', 'OWNER/NAME', name, '--local-dir', str(root)])}"


def an_earlier_checkpoint(subject: Subject, otherwise: str) -> str:
    """Return how to find a checkpoint of the same run that is whole, then what to do `otherwise`."""
    folder = subject.checkpoint.folder
    if isinstance(subject, RunSubject) or folder.trainer is None or not folder.is_numbered:
        return f"use an earlier checkpoint; {otherwise}"
    command = shlex.join(["lora-tool", "validate", str(folder.root.parent if folder.root.name else "..")])
    return f"find the last complete checkpoint: {command}; {otherwise}"


class ModelSubject(Subject, frozen=True, kw_only=True, eq=False, dict=True):
    """A model folder."""

    checkpoint: ModelDir
    num_labels: int | None = None
    task: str | None = None
    base: ModelDir | None = None
    """The model that it is compared with, tensor by tensor."""
    servers: frozenset[str] = frozenset()
    """What the model must be fit for (`--for`)."""
    contradiction: Problem | None = None
    """What transformers, where a merge asked it, found that config and weights contradict each other in."""
    ask: AskClass | None = None
    """What compares the tensors with their class where the table is not sure: transformers, if it is installed."""

    @property
    def named(self) -> Mapping[str, str]:
        """See `Subject`."""
        return {"MODEL": shlex.quote(str(self.checkpoint.root))}

    @cached_property
    def plain(self) -> ModelDir:
        """The model with a matrix for each quantised weight; as it is stored where those are not read."""
        from lora_tool.checkpoints.quantised import as_matrices  # only models need it

        return as_matrices(self.checkpoint)

    @property
    def formats(self) -> tuple[str, ...]:
        """See `Subject`; the config's word where lora-tool does not read the format."""
        from lora_tool.formats.quantised.encodings import encoding_of

        found = dict.fromkeys(str(each) for each in map(encoding_of, self.matrices.values()) if each is not None)
        config = self.checkpoint.config
        return tuple(found) or ((config.quantization,) if config is not None and config.quantization else ())

    @property
    def matrices(self) -> TensorTable:
        """The tensors, with a matrix for each quantised weight."""
        return self.plain.tensors

    @property
    def class_tensors(self) -> ModelTensors | None:
        """The tensors compared with those of the model's class; None where neither headers nor transformers determine it."""
        return self._of_class if not isinstance(self._of_class, str) else None

    @cached_property
    def _of_class(self) -> ModelTensors | str | None:
        """The same, with the reason where they are not known; None where config or weights cannot be believed."""
        return None if self._config is None else self.compared(self._config, self.shapes, self.ask)

    def compared(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], ask: AskClass | None = None
    ) -> ModelTensors | str:
        """Return tensors of these shapes compared with the class of `config`, or why that is not possible.

        `ask` is called where the table does not cover the config, or finds something wrong; and where no table has the
        type, if every byte is read anyway: importing transformers takes seconds.
        """
        from lora_tool.models import model_tensors  # for models alone

        found = model_tensors.model_tensors(config, shapes)
        if found is not None and not found.accuses(shapes):
            return found
        unsure = found.doubt if found is not None else model_tensors.why_unsure(config)
        if ask is None or (found is None and unsure is None and not self.whole):
            return found or model_tensors.why_unknown(config)
        answer = ask(config, shapes)
        if found is None:
            return f"{unsure or model_tensors.why_unknown(config)}; {answer}" if isinstance(answer, str) else answer
        if isinstance(answer, str):
            return found if unsure is None else replace(found, doubt=f"{unsure}; {answer}")
        others = tuple(name for name in answer.of_other_classes if name not in found.unexpected)
        strange = {*answer.unexpected, *answer.of_other_classes} - {*others}  # only the table knows the other classes
        return replace(answer, unexpected=tuple(n for n in shapes if n in strange), of_other_classes=others)

    @cached_property
    def asked(self) -> ModelTensors | None:
        """What transformers says of the class, for a suspicion without a table; None where it cannot tell or is not asked."""
        answer = None if self.ask is None or self._config is None else self.ask(self._config, self.shapes)
        return None if isinstance(answer, str) else answer

    def as_class(self, name: str, *, sure: bool) -> ModelTensors | None:
        """Return the tensors compared with those of another class of the model's type; None where that is not known.

        Only to be `sure` transformers is asked: a head that the class adds is missing in every base.
        """
        config = self._config
        if config is None or name in config.architectures[:1]:
            return self.class_tensors
        found = self.compared(replace(config, architectures=(name,)), self.shapes, self.ask if sure else None)
        return None if isinstance(found, str) else found

    @property
    def is_unsure(self) -> bool:
        """Whether the table of classes has the model's, but does not cover its config: no guess replaces the check."""
        from lora_tool.models.model_tensors import why_unsure  # for models alone

        return self._config is not None and why_unsure(self._config) is not None

    @property
    def _layers_tell(self) -> bool:
        """Whether layers may be compared with one another, because no table knows the class."""
        from lora_tool.models.layers import is_regular  # for models alone

        known = self._config is None or self.class_tensors is not None or self.is_unsure
        return self._config is not None and not known and is_regular(self._config)

    @cached_property
    def odd_tensors(self) -> tuple[OddTensor, ...]:
        """Tensors that one layer lacks or has in another shape than its like; empty if class or base is known."""
        from lora_tool.models.layers import odd_tensors  # only models need it

        if self._config is None or self.base is not None or not self._layers_tell:
            return ()
        return tuple(odd_tensors(self._config, self.shapes))

    @property
    def lost_end(self) -> str | None:
        """The evidence that embeddings or output layer of a class in no table are lost; None if they are there."""
        from lora_tool.models.layers import lost_end  # only models need it

        if self._config is None or self.expected or not self._layers_tell:
            return None
        return lost_end(self._config, self.shapes)

    @property
    def lost_everywhere(self) -> tuple[str, ...]:
        """The evidence for each tensor lost from every layer; empty where the class, a base or a ledger is known."""
        from lora_tool.models.layers import lost_everywhere  # only models need it

        if self._config is None or self.base is not None or self.expected or not self._layers_tell:
            return ()
        return tuple(lost_everywhere(self._config, self.shapes))

    @property
    def why_no_class(self) -> str | None:
        """Why the tensors of the model's class are unknown; None if known, or if a ledger or plan lists them."""
        return self._of_class if isinstance(self._of_class, str) and not self.expected else None

    @property
    def _config(self) -> ModelConfig | None:
        """The config, where it and the weights can be believed, without the quantisation of weights that are read."""
        config = self.checkpoint.config
        return self.plain.config if config is not None and not config.problems and self.tensors else None

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, of what quantised weights stand for."""
        return {name: tensor.shape for name, tensor in self.matrices.items()}

    @property
    def expected(self) -> Mapping[str, TensorSpec] | None:
        """The tensors that the folder should hold, by its manifest; None where it has none."""
        manifest = self.checkpoint.manifest
        return None if manifest is None else manifest.tensors


class LoraSubject(Subject, frozen=True, kw_only=True, eq=False):
    """A folder that LoRA may be in: an adapter, or rank files. Each says how its pairs are found."""

    def half_pairs(self) -> Iterator[HalfPair]:
        """Yield the pairs with only one factor."""
        raise NotImplementedError


class AdapterSubject(LoraSubject, frozen=True, kw_only=True, eq=False):
    """An adapter folder, its view, and the base it is compared with."""

    checkpoint: AdapterDir
    view: AdapterView
    base: ModelDir | None = None
    stored_base: ModelSubject | None = None
    """The base as it is on disk, as the rules about models look at it."""
    match: BaseMatch | str | None = None
    """How the base names the modules; a sentence where names cannot tell; None without a base."""
    same_names: BaseMatch | None = None
    """Where they cannot: the base, if some modules are there under the adapter's names."""
    in_memory: AdapterSubject | None = None
    """Adapter and base under the names in memory, where they are others than on disk, and known."""
    num_labels: int | None = None
    task: str | None = None
    servers: frozenset[str] = frozenset()
    """What the adapter must be fit for (`--for`)."""
    why_no_base: str = ""
    """Why there is no base, as a sentence; of no meaning where there is one."""

    @property
    def named(self) -> Mapping[str, str]:
        """See `Subject`."""
        base = {} if self.base is None else {"BASE": shlex.quote(str(self.base.root))}
        return {"ADAPTER": shlex.quote(str(self.checkpoint.root)), **base}

    @property
    def config(self) -> AdapterConfig:
        """Its config, PEFT's defaults where the file could not be read; rules that need the config do not run then."""
        return self.view.config

    def half_pairs(self) -> Iterator[HalfPair]:
        """See `LoraSubject`."""
        return self.view.found(half_pair_in)

    @property
    def layers(self) -> tuple[LoraLayer, ...]:
        """Its LoRA, by module."""
        return self.view.layers

    @property
    def matched(self) -> BaseMatch:
        """The base, for rules that need one: they run only where names can tell, at least of some modules."""
        match = self.match if isinstance(self.match, BaseMatch) else self.same_names
        if match is None:
            raise TypeError("rules that need a base run only with one that matches")
        return match

    @property
    def text_class(self) -> TextClass | None:
        """The text class of a multimodal base that it was trained on; None of any other base, and without one."""
        config, modules = self.base and self.base.config, (layer.target for layer in self.layers)
        return text_class_of(config.model_type or "", self.base.tensors, modules) if self.base and config else None

    @property
    def why_no_match(self) -> str | None:
        """Why names cannot tell which of the base's tensors the adapter means; None where they can."""
        return self.match if isinstance(self.match, str) else None

    @property
    def home(self) -> str:
        """The file that holds the tensors."""
        return next((str(file.path) for file in self.checkpoint.weights.files), str(self.checkpoint.root))

    @property
    def config_path(self) -> str:
        """The path of `adapter_config.json`."""
        return str(self.config.path)

    @property
    def has_output_layer(self) -> bool:
        """Whether it is merged into a class with an output layer, as far as config and options state it."""
        return not self.is_reward() and trained_for(self.config) in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM")

    def is_reward(self) -> bool:
        """Whether a classification or reward model is expected: by its task type, or by the option."""
        return self.config.task_type == "SEQ_CLS" or self.task in ("reward", "seq-cls")

"""A merged model, and its base with the adapter unmerged, as transformers and PEFT run them: in float32, on the CPU."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import ModelDir
from lora_tool.core.errors import LoraToolError, MissingDependency, UnsupportedAdapter
from lora_tool.core.progress import Progress
from lora_tool.formats.adapter_config import INITS_THAT_KEEP_THE_BASE
from lora_tool.models.mapping.quiet import quiet
from lora_tool.plans.base.task import Task, names_classifier
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.model.reading import plain_row
from lora_tool.plans.merge.provenance import Provenance
from lora_tool.verification.elements import Files
from lora_tool.verification.inputs import tokenizer_in
from lora_tool.verification.layers import (
    Noise,
    NotStreamable,
    bare_model,
    finder,
    peft_names,
    shaken,
    stream,
    with_adapters,
)

try:
    import torch
    import transformers
    from peft import PeftModel
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    from lora_tool.models.mapping import meta
except ImportError as error:
    raise MissingDependency("transformers", extra="merge") from error

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_LANGUAGE_MODELS = {
    "AutoModelForCausalLM": frozenset(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()),
    "AutoModelForImageTextToText": frozenset(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()),
}
"""Auto class → the classes that it loads."""


def asking(work: Callable[[], T], merged: Path, option: str) -> T:
    """Return what `work` returns, which runs models for the `option`: without gradients and the libraries' warnings.

    Raises what it raises of ours, and `UnsupportedAdapter` where transformers or PEFT cannot build or run `merged`.
    """
    with quiet(), torch.inference_mode():
        try:
            return work()
        except LoraToolError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UnsupportedAdapter(f"{merged} cannot be run for {option}: {reason}") from error


class Streamed(Protocol[T_co]):
    """Work that runs models: with a layer at a time in memory, or with each model whole."""

    def __call__(self, *, streamed: bool) -> T_co:
        """Return what the models answer."""


class Models(ABC):
    """Both models, as what is asked of them, `_answers`, runs them; no code of a checkpoint is run."""

    def __init__(self, provenance: Provenance, plan: Plan | None, option: str) -> None:
        self._provenance = provenance
        self._plan = plan
        merged = provenance.merged.root
        classes = provenance.merged.config.architectures if provenance.merged.config else ()
        self._classifier = names_classifier(classes)
        auto = "AutoModelForSequenceClassification" if self._classifier else "AutoModelForCausalLM"
        if classes and not self._classifier:
            auto = next((name for name, known in _LANGUAGE_MODELS.items() if classes[0] in known), "")
        self._text_class = _text_class(provenance, auto or "AutoModelForCausalLM")
        if not auto and self._text_class is None:
            raise UnsupportedAdapter(
                f"{merged}: {option} compares language models and classifiers, but this is a {classes[0]}"
            )
        self._auto = getattr(transformers, self._text_class or auto)
        self._config = self._read_config(merged)
        self._folders = [merged, *(adapter.root for adapter in provenance.adapters), provenance.base.root]

    @abstractmethod
    def _answers(self, model: Any) -> torch.Tensor:
        """Return what the model answers."""

    def _run(self, runs: Streamed[T]) -> tuple[T, bool]:
        """Return what `runs` returns, and whether a layer at a time was in memory, which it is told to try first."""
        streamed = self._can_stream()
        try:
            return runs(streamed=streamed), streamed
        except (NotStreamable, NotImplementedError, RuntimeError):
            if not streamed:
                raise
            return runs(streamed=False), False

    def _unmerged(self, noise: Noise | None, *, streamed: bool) -> torch.Tensor:
        return self._streamed_unmerged(noise) if streamed else self._loaded_unmerged(noise)

    def _merged(self, *, streamed: bool) -> torch.Tensor:
        return self._plain(self._provenance.merged, self._config, streamed=streamed)

    def _can_stream(self) -> bool:
        """Whether the base is stored as it is in memory, and PEFT does not change it when it builds its layers."""
        provenance = self._provenance
        if not provenance.adapters:
            return True  # there is the one model, whose names are tried
        configs = [adapter.config for adapter in provenance.adapters]
        if self._plan is None or not all(c and c.init_lora_weights in INITS_THAT_KEEP_THE_BASE for c in configs):
            return False
        task = Task.SEQ_CLS if self._classifier else Task.CAUSAL_LM
        return plain_row(provenance.base, provenance.adapters, task) is not None

    def _noise(self) -> Noise:
        """Return the types of the merged tensors that are not the base's bytes; of all floats where nobody says."""
        tensors = self._provenance.merged.tensors
        steps = self._plan.steps if self._plan is not None else ()
        copied = {
            step.out.name
            for step in steps
            if step.op.is_copy and step.out.name in tensors and tensors[step.out.name].dtype is step.op.source.dtype
        }
        return {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype.is_float and name not in copied}

    def _streamed_unmerged(self, noise: Noise | None) -> torch.Tensor:
        with Files() as files:
            model = with_adapters(bare_model(self._auto, self._base_config()), self._provenance.adapters)
            stream(model, finder(self._provenance.base.tensors, self._provenance.adapters), files, noise=noise)
            return self._answers(model)

    def _plain(self, which: ModelDir, config: Any, *, streamed: bool) -> torch.Tensor:
        """Return what a model without an adapter answers."""
        if not streamed:
            answers = self._answers(self._load(which.root, config))
            gc.collect()
            return answers
        with Files() as files:
            model = bare_model(self._auto, config)
            stream(model, which.tensors.get, files)
            return self._answers(model)

    def _loaded_unmerged(self, noise: Noise | None) -> torch.Tensor:
        model = self._load(self._provenance.base.root, self._base_config())
        folders = [str(adapter.root) for adapter in self._provenance.adapters]
        names = peft_names(len(folders))
        model = PeftModel.from_pretrained(model, folders[0], adapter_name=names[0])
        for name, folder in zip(names[1:], folders[1:], strict=True):
            model.load_adapter(folder, adapter_name=name)
        tuner: Any = model.base_model  # a LoraModel, which PEFT types as a module
        tuner.set_adapter(names)
        if noise is not None:
            _shake(model, next(iter(noise.values())) if noise else None)
        answers = self._answers(model.eval())
        del model
        gc.collect()
        return answers

    def _load(self, folder: Path, config: Any) -> Any:
        return self._auto.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        ).eval()

    def _read_config(self, folder: Path) -> Any:
        """Return the config in the folder, the text model's where that alone is run."""
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if self._text_class is None:
            return config
        text = config.get_text_config()
        if self._classifier:
            text.num_labels = config.num_labels
        return text

    def _base_config(self) -> Any:
        """Return the base's config, with the labels and the pad token that the merged model was given."""
        config = self._read_config(self._provenance.base.root)
        if self._classifier:
            config.num_labels = self._config.num_labels
        config.get_text_config().pad_token_id = self._config.get_text_config().pad_token_id
        return config


def _text_class(provenance: Provenance, auto: str) -> str | None:
    """Return the class of the text model alone where the adapters were trained on that of a multimodal base, else None.

    It runs both models: PEFT finds the adapters' modules in no other.
    """
    config = provenance.base.whole_config
    name = meta.text_class(config, auto if auto == "AutoModelForSequenceClassification" else "AutoModelForCausalLM")
    if name is None or not provenance.adapters:
        return None
    modules = meta.facts_of(meta.build(config, name, torch.float32), torch.float32).modules
    targets = (layer.target for adapter in provenance.adapters for layer in view_of(adapter).layers)
    return name if any("." in target and target in modules for target in targets) else None


class TextModels(Models):
    """Models that are given whole texts: as the tokenizer beside them splits those, nothing kept between two batches."""

    def __init__(self, provenance: Provenance, plan: Plan | None, option: str) -> None:
        super().__init__(provenance, plan, option)
        self._config.get_text_config().use_cache = False
        self._advance: Progress = lambda _: None

    def _tokenizer(self, longest: int) -> tuple[Any, int]:
        """Return the tokenizer, and how many tokens it and the model take at once: at most `longest`.

        Raises `UnsupportedAdapter` where there is none.
        """
        tokenizer = tokenizer_in(self._folders)
        if tokenizer is None:
            root = self._provenance.merged.root
            raise UnsupportedAdapter(f"neither {root} nor base nor adapter has a tokenizer that transformers can load")
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        room = (longest, positions, tokenizer.model_max_length)
        return tokenizer, min(length for length in room if length and length > 0)

    def _base_config(self) -> Any:
        config = super()._base_config()
        config.get_text_config().use_cache = False
        return config


def _shake(model: Any, dtype: Any) -> None:
    """Move the weights of adapted layers at random by up to half a unit in the last place of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if dtype is not None and (".base_layer." in name or ".modules_to_save." in name):
            parameter.copy_(shaken(parameter, dtype, generator))

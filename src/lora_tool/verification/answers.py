"""Asking a merged model, and its base with the adapter unmerged, the same; and measuring what rounding explains."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_tool.errors import LoraToolError, MissingDependency, UnsupportedAdapter
from lora_tool.formats.adapter_config import INITS_THAT_KEEP_THE_BASE
from lora_tool.names.quiet import quiet
from lora_tool.plan.base.task import Task, names_classifier
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.merge.provenance import Provenance
from lora_tool.plan.merge.read_base import plain_row
from lora_tool.rules.merged.evidence import OutputEvidence
from lora_tool.verification.elements import Files
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
from lora_tool.verification.prompts import Inputs, tokenized

try:
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise MissingDependency("transformers", extra="merge") from error

_BATCH = 8
_POSITIONS = 4
"""Last positions of each prompt whose logits are compared: a vocabulary of 150,000 takes 0.6 MB each."""
_NOISE = 1e-5
"""What float32 runs of one model may differ by, relative to the largest value; layers add roundoffs of 6e-8."""

_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""The classes that AutoModelForCausalLM loads."""


def ask(provenance: Provenance, plan: Plan | None, *, prompts: Sequence[str] | None = None) -> OutputEvidence:
    """Return how far the answers of the merged model and of base + adapter are apart, both computed in float32.

    Where the base is stored as it is in memory, a layer at a time is read from the disk; else the models are loaded
    whole, one after the other. No code of a checkpoint is run. Raises `UnsupportedAdapter` where transformers or PEFT
    cannot build or run the models.
    """
    with quiet(), torch.inference_mode():
        try:
            return _Asking(provenance, plan, prompts).evidence()
        except LoraToolError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UnsupportedAdapter(f"{provenance.merged.root} cannot be run for --logits: {reason}") from error


class _Asking:
    """One comparison: the inputs, and a run for each model."""

    def __init__(self, provenance: Provenance, plan: Plan | None, prompts: Sequence[str] | None) -> None:
        self._provenance = provenance
        self._plan = plan
        merged = provenance.merged.root
        self._config = AutoConfig.from_pretrained(merged, local_files_only=True, trust_remote_code=False)
        classes = provenance.merged.config.architectures if provenance.merged.config else ()
        self._classifier = names_classifier(classes)
        if classes and not self._classifier and classes[0] not in _CAUSAL:
            raise UnsupportedAdapter(
                f"{merged}: --logits compares language models and classifiers, this is a {classes[0]}"
            )
        self._auto = AutoModelForSequenceClassification if self._classifier else AutoModelForCausalLM
        text = self._config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0
        folders = [merged, *(adapter.root for adapter in provenance.adapters), provenance.base.root]
        self._inputs = tokenized(folders, prompts, vocab_size=text.vocab_size, pad_id=text.pad_token_id)

    def evidence(self) -> OutputEvidence:
        streamed = self._can_stream()
        try:
            runs = self._runs(streamed=streamed)
        except (NotStreamable, NotImplementedError, RuntimeError):
            if not streamed:
                raise
            streamed = False
            runs = self._runs(streamed=False)
        return _evidence(*runs, what="scores" if self._classifier else "logits", inputs=self._inputs, streamed=streamed)

    def _can_stream(self) -> bool:
        """Whether the base is stored as it is in memory, and PEFT does not change it when it builds its layers."""
        provenance = self._provenance
        configs = [adapter.config for adapter in provenance.adapters]
        if self._plan is None or not all(c and c.init_lora_weights in INITS_THAT_KEEP_THE_BASE for c in configs):
            return False
        task = Task.SEQ_CLS if self._classifier else Task.CAUSAL_LM
        return plain_row(provenance.base, provenance.adapters, task) is not None

    def _runs(self, *, streamed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the answers of base + adapter, of the merged model, and of base + adapter with rounding's noise."""
        if streamed:
            return self._streamed_unmerged(None), self._streamed_merged(), self._streamed_unmerged(self._noise())
        return self._loaded_unmerged(None), self._loaded_merged(), self._loaded_unmerged(self._noise())

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

    def _streamed_merged(self) -> torch.Tensor:
        with Files() as files:
            model = bare_model(self._auto, self._config)
            stream(model, self._provenance.merged.tensors.get, files)
            return self._answers(model)

    def _loaded_unmerged(self, noise: Noise | None) -> torch.Tensor:
        model = self._load(self._provenance.base.root, self._base_config())
        folders = [str(adapter.root) for adapter in self._provenance.adapters]
        names = peft_names(len(folders))
        model = PeftModel.from_pretrained(model, folders[0], adapter_name=names[0])
        for name, folder in zip(names[1:], folders[1:], strict=True):
            model.load_adapter(folder, adapter_name=name)
        model.base_model.set_adapter(names)
        if noise is not None:
            _shake(model, next(iter(noise.values())) if noise else None)
        answers = self._answers(model.eval())
        del model
        gc.collect()
        return answers

    def _loaded_merged(self) -> torch.Tensor:
        answers = self._answers(self._load(self._provenance.merged.root, self._config))
        gc.collect()
        return answers

    def _load(self, folder: Path, config: Any) -> Any:  # noqa: ANN401
        return self._auto.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        ).eval()

    def _base_config(self) -> Any:  # noqa: ANN401
        """Return the base's config, with the labels and the pad token that the merged model was given."""
        config = AutoConfig.from_pretrained(self._provenance.base.root, local_files_only=True, trust_remote_code=False)
        if self._classifier:
            config.num_labels = self._config.num_labels
        config.get_text_config().pad_token_id = self._config.get_text_config().pad_token_id
        return config

    def _answers(self, model: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the scores, [texts, labels], or the last logits of each prompt, [positions, vocabulary]. Float32."""
        found = []
        for at in range(0, len(self._inputs.ids), _BATCH):
            ids, mask = self._inputs.ids[at : at + _BATCH], self._inputs.mask[at : at + _BATCH]
            logits = model(input_ids=ids, attention_mask=mask).logits.float()
            if self._classifier:
                found.append(logits)
                continue
            for row, length in zip(logits, mask.sum(dim=1).tolist(), strict=True):
                found.append(row[max(0, length - _POSITIONS) : length].clone())
        return torch.cat(found)


def _shake(model: Any, dtype: Any) -> None:  # noqa: ANN401
    """Move the weights of adapted layers at random by up to half a unit in the last place of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if dtype is not None and (".base_layer." in name or ".modules_to_save." in name):
            parameter.copy_(shaken(parameter, dtype, generator))


def _evidence(
    unmerged: torch.Tensor, merged: torch.Tensor, moved: torch.Tensor, *, what: str, inputs: Inputs, streamed: bool
) -> OutputEvidence:
    apart, explained = (merged - unmerged).abs(), (moved - unmerged).abs()
    causal = what == "logits"
    labels = unmerged.shape[-1]
    return OutputEvidence(
        what=what,
        inputs=inputs.what,
        values=unmerged.numel(),
        largest=float(apart.max()),
        mean=float(apart.mean()),
        explained_largest=float(explained.max()),
        explained_mean=float(explained.mean()),
        noise=_NOISE * max(1.0, float(unmerged.abs().max())),
        divergence=_divergence(unmerged, merged) if causal else None,
        explained_divergence=_divergence(unmerged, moved) if causal else None,
        same_choice=float((unmerged.argmax(-1) == merged.argmax(-1)).float().mean()) if labels > 1 else None,
        rank_agreement=_kendall(unmerged[:, 0], merged[:, 0]) if labels == 1 else None,
        streamed=streamed,
    )


def _divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return the mean over positions of KL(p ‖ q) of the next token, in nats."""
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def _kendall(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Return Kendall's tau-b of two lists; None where one of them is all ties."""
    one, other = (torch.sign(values[:, None] - values[None, :]) for values in (first, second))
    untied = float(one.count_nonzero() * other.count_nonzero()) ** 0.5
    return float((one * other).sum()) / untied if untied else None

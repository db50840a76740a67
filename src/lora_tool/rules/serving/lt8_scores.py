"""LT825: what servers make of a reward. From vLLM 0.32's `pooler/activations.py`, SGLang's `serving_classify.py` and
transformers 5.23's text-classification pipeline.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_tool.core.report import Severity
from lora_tool.formats.model_config import ModelConfig
from lora_tool.rules.adapter.lt3_head import head_weight, saved_heads
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Server, Subject

_RAW_IN_VLLM = "--runner pooling --pooler-config '{\"use_activation\": false}'"
"""The options with which `vllm serve` gives scores as they are."""
_CLASSIFIER = "ForSequenceClassification"
_AS_IT_IS = "regression"
"""The `problem_type` with which vLLM and transformers leave scores as they are."""


@rule("LT825", Severity.INFO, on=Subject, needs={Need.SERVER})
def reward_becomes_a_probability(subject: Subject) -> Iterator[Fault]:
    """A server turns the reward into a probability unless it is told not to.

    What it does: Reports, for classifiers with one label, what the server answers by default, and the option that gives
    the reward itself. Nothing is reported where `config.json` tells the server: `"problem_type": "regression"`, or an
    `activation_fn` of sentence-transformers for vLLM.
    Why it matters: sigmoid(reward) keeps the order, but differences near 0 and 1 vanish, and a threshold, a mean or an
    advantage computed from it is another one. Softmax over one score is 1 for every text.
    Example: vLLM's `classify` answers 0.302, where the reward is -0.837.
    What to do: Use the server's option, or write `"problem_type": "regression"` into `config.json`.
    """
    if not isinstance(subject, AdapterSubject | ModelSubject) or not subject.servers:
        return
    config = _config_of_a_reward(subject)
    if config is None or config.get("problem_type") == _AS_IT_IS:
        return
    servers = {each.partition("@")[0] for each in subject.servers}
    if Server.VLLM in servers and _is_changed_by_vllm(config):
        served = (
            "RM-BASE --enable-lora"
            if isinstance(subject, AdapterSubject)
            else shlex.quote(str(subject.checkpoint.root))
        )
        message = "vLLM answers with sigmoid(reward), between 0 and 1, unless it is started with `use_activation` false"
        yield Fault(message=message, hint=f"vllm serve {served} {_RAW_IN_VLLM}")
    if Server.SGLANG in servers and isinstance(subject, ModelSubject):  # it serves no adapter's head
        message = "SGLang's /v1/classify answers 1.0 for every text: it takes the softmax of one score"
        yield Fault(message=message, hint="ask SGLang's /classify, whose `embedding` holds the reward")
    if Server.PEFT in servers:
        message = "transformers' text-classification pipeline answers with sigmoid(reward), between 0 and 1"
        yield Fault(message=message, hint='call the pipeline with function_to_apply="none"')


def serving_rewards(model: Path, config: ModelConfig) -> str | None:
    """Return the command with which vLLM gives the rewards of the `model` as they are.

    None for a model that is no classifier with one label, and for one whose config tells vLLM already.
    """
    wanted = is_reward_model(config) and _is_changed_by_vllm(config.raw)
    return f"vllm serve {shlex.quote(str(model))} {_RAW_IN_VLLM}" if wanted else None


def is_reward_model(config: ModelConfig) -> bool:
    """Return whether it is the config of a sequence classifier with one label."""
    return config.num_labels == 1 and any(each.endswith(_CLASSIFIER) for each in config.architectures)


def _config_of_a_reward(subject: AdapterSubject | ModelSubject) -> Mapping[str, Any] | None:
    """Return what config.json says of a model that gives one reward, {} where none is here; None for any other."""
    if isinstance(subject, AdapterSubject):
        head = head_weight(saved_heads(subject)) if subject.is_reward() else None
        known = subject.base.config if subject.base is not None else None
        return None if head is None or head.shape[0] > 1 else {} if known is None else known.raw
    found = subject.checkpoint.config
    return found.raw if found is not None and is_reward_model(found) else None


def _is_changed_by_vllm(config: Mapping[str, Any]) -> bool:
    """Return whether the config names no function for scores, for vLLM or as sentence-transformers writes it."""
    inner = config.get("sentence_transformers")
    return config.get("problem_type") != _AS_IT_IS and not (isinstance(inner, dict) and "activation_fn" in inner)

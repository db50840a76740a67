"""TRL's dpo script with the trainer of cpo or orpo, which have none of their own and read the same data."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from transformers import AutoTokenizer

from lora_tool_train.config import trl_parser
from lora_tool_train.methods import METHODS, Method


def run(method: Method, arguments: tuple[Any, ...]) -> None:
    """Train by the `method` with TRL's dataclasses: script, training, model and mixture arguments."""
    kind = getattr(importlib.import_module(method.home), f"{method.prefix}Trainer")

    def trainer(*, model: str, args: Any, quantization_config: Any, **rest: Any) -> Any:
        if quantization_config is not None:
            args.model_init_kwargs["quantization_config"] = quantization_config
        where = {"revision": args.model_init_kwargs["revision"], "trust_remote_code": args.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(model, **where)
        # the trainer makes its collator before it would set one
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return kind(model, args=args, processing_class=tokenizer, **rest)

    trl: Any = importlib.import_module("trl")
    theirs, trl.DPOTrainer = trl.DPOTrainer, trainer
    try:
        importlib.import_module("trl.scripts.dpo").main(*arguments)
    finally:
        trl.DPOTrainer = theirs


if __name__ == "__main__":
    method = METHODS[sys.argv[1]]
    run(method, trl_parser(method).parse_args_and_config(sys.argv[2:], fail_with_unknown_args=False))

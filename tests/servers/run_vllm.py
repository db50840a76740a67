"""Run by the Python that has vLLM: load a model once, then adapters one by one, and say what each gives.

`run_vllm.py JOB ANSWERS`: JOB is JSON with `model`, `prompts` (lists of token ids), `adapters` (name to folder),
`options` of `vllm.LLM`, and `compute`, false where this machine has no kernel for the model's LoRA. Each answer is a
line of JSON: the name, and `error`, or `values`, the log probabilities of all tokens after each prompt (or the rewards),
and `norm`, the Frobenius norm of all the loaded B.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is in this process, and can be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import torch
from vllm import LLM, PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.3,
    "skip_tokenizer_init": True,
}


def values(llm: LLM, prompts: list[list[int]], vocabulary: int, adapter: LoRARequest | None) -> list[list[float]]:
    """Return the log probability of every token after each prompt."""
    asked = SamplingParams(max_tokens=1, temperature=0, logprobs=vocabulary, detokenize=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(given, asked, lora_request=adapter, use_tqdm=False)
    first = [answer.outputs[0].logprobs[0] for answer in answers]
    return [[each[token].logprob for token in range(vocabulary)] for each in first]


def rewards(llm: LLM, prompts: list[list[int]], adapter: LoRARequest | None) -> list[list[float]]:
    """Return the outputs of a classifier's head for each prompt, without an activation."""
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    raw = PoolingParams(use_activation=False)
    answers = llm.encode(given, pooling_task="classify", pooling_params=raw, lora_request=adapter, use_tqdm=False)
    return [answer.outputs.data.tolist() for answer in answers]


def _norm(model: torch.nn.Module) -> float:
    """Return the norm of all loaded B; layers of experts have parts of theirs under other names, too."""
    stacks: list[Any] = [module.lora_b_stacked for module in model.modules() if hasattr(module, "lora_b_stacked")]
    parts = [tensor for stack in stacks for tensor in (stack if isinstance(stack, tuple | list) else (stack,))]
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in parts))


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def asked(adapter: LoRARequest | None) -> list[list[float]]:
        if job["options"].get("runner") == "pooling":
            return rewards(llm, job["prompts"], adapter)
        return values(llm, job["prompts"], job["vocabulary"], adapter)

    try:
        llm = LLM(model=job["model"], **OPTIONS | job["options"])
    except Exception as error:  # noqa: BLE001 - whatever it says is the answer
        yield {"name": "", "error": f"{type(error).__name__}: {error}"}
        return
    yield {"name": "", "values": asked(None) if job["compute"] else None}
    for at, (name, folder) in enumerate(job["adapters"].items(), 1):
        request = LoRARequest(name, at, folder)
        try:
            llm.llm_engine.add_lora(request)  # a refusal inside `generate` leaves the request in the scheduler
        except Exception as error:  # noqa: BLE001 - as above
            yield {"name": name, "error": f"{type(error).__name__}: {error}"}
            continue
        (norm,) = llm.apply_model(_norm)
        yield {"name": name, "norm": norm, "values": asked(request) if job["compute"] else None}
        llm.llm_engine.remove_lora(at)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with Path(sys.argv[2]).open("w") as out:
        for answer in answers(job):
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main()

"""How a repository of the Hub may be written, and what its name says of its weights."""

from __future__ import annotations

import pytest

from lora_tool.core.hub_names import HubName, hub_name
from lora_tool.formats.quantised.names import full_precision_name


@pytest.mark.parametrize(
    ("written", "repo", "revision"),
    [
        ("o/m", "o/m", None),
        ("o/m@v1", "o/m", "v1"),
        ("hf://o/m@refs/pr/1", "o/m", "refs/pr/1"),
        ("https://huggingface.co/o/m", "o/m", None),
        ("HTTPS://huggingface.co/o/m/", "o/m", None),
        ("http://www.huggingface.co/o/m", "o/m", None),
        ("hf.co/o/m#usage", "o/m", None),
        ("https://huggingface.co/o/m/tree/main", "o/m", "main"),
        ("https://huggingface.co/o/m/tree/refs%2Fpr%2F3", "o/m", "refs/pr/3"),
        ("https://huggingface.co/o/m/resolve/v1/config.json?download=true", "o/m", "v1"),
        ("https://huggingface.co/o/m/blob/refs/pr/3/sub/config.json", "o/m", "refs/pr/3"),
        ("https://huggingface.co/o/m/commit/0123abc", "o/m", "0123abc"),
        ("https://huggingface.co/o/m/discussions/1", "o/m", None),
        ("https://mirror.example/o/m", "o/m", None),
        ("gpt2", "gpt2", None),
    ],
)
def test_a_repository_is_understood(
    written: str, repo: str, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert hub_name(written) == HubName(id=repo, revision=revision)


@pytest.mark.parametrize(
    "written",
    [
        "https://huggingface.co/datasets/o/d",
        "https://huggingface.co/spaces/o/s",
        "https://huggingface.co/o",
        "https://example.com/o/m",
        "https://huggingface.co/o/m/tree/main/checkpoint-500",
        "a/b/c",
        "o/mü",
        "../x",
        "",
        "hf://",
    ],
)
def test_what_is_no_repository_of_a_model_is_none(written: str) -> None:
    assert hub_name(written) is None


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit", "unsloth/Llama-3.2-1B-Instruct"),
        ("unsloth/Qwen2.5-0.5B-bnb-4bit", "unsloth/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("o/Mistral-7B-Instruct-v0.3-FP8-dynamic", "o/Mistral-7B-Instruct-v0.3"),
        ("o/Mistral-7B-v0.2-GPTQ", "o/Mistral-7B-v0.2"),
        ("mlx-community/Llama-3.2-3B-Instruct-4bit", "mlx-community/Llama-3.2-3B-Instruct"),
        ("o/Qwen3-4B-MLX-8bit", "o/Qwen3-4B"),
        ("o/m-Q4_K_M-GGUF", "o/m"),
        ("o/m-i1-GGUF", "o/m"),
        ("o/m-4.0bpw-exl2", "o/m"),
        ("o/m-quantized.w4a16", "o/m"),
        ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "nvidia/Llama-3.1-8B-Instruct"),
        ("o/Qwen2.5-7B-Instruct", None),
        ("o/Llama-3.2-1B-bf16", None),
        ("o/model-4b", None),
        ("o/unsloth-mlx", None),
        ("o/q4", None),
    ],
)
def test_a_name_tells_the_model_that_was_quantised(name: str, plain: str | None) -> None:
    assert full_precision_name(name) == plain

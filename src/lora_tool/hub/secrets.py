"""Finding secrets in what would be published: by their form, and the values of this process's own variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from lora_tool.core.errors import CorruptFile, PlanError
from lora_tool.formats.safetensors import scan_file
from lora_tool.hub.model import PushContent

_FORMS: tuple[tuple[str, tuple[bytes, ...], re.Pattern[bytes]], ...] = tuple(
    (kind, tuple(begin.encode() for begin in begins.split()), re.compile(form.encode()))
    for kind, begins, form in (
        ("Hugging Face token", "hf_", r"\bhf_(?:[A-Za-z0-9]{30,}|(?:jwt|oauth)_[\w.\-]{20,})"),
        ("AWS key", "AKIA ASIA", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
        ("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"\b(?:gh\w_[A-Za-z0-9]{36,}|github_pat_\w{50,})"),
        ("GitLab token", "glpat-", r"\bglpat-[\w\-]{20,}"),
        ("OpenAI or Anthropic key", "sk-", r"\bsk-(?:ant-|proj-|svcacct-)?[A-Za-z0-9_\-]{32,}"),
        ("Slack token", "xox", r"\bxox[abeprs]-[\w\-]{10,}"),
        ("Google key", "AIza", r"\bAIza[\w\-]{35}"),
        (
            "Weights & Biases key",
            "WANDB_API_KEY wandb_api_key api.wandb.ai",
            r"[\w.]{12,13}[^\n]{0,40}?(?<![0-9A-Za-z])[0-9a-f]{40}\b",
        ),
        ("JSON web token", "eyJ", r"\beyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]{10,}"),
        ("private key", "-----BEGIN", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----"),
    )
)
"""What it is, how it begins, and its whole form: looking for beginnings takes a hundredth of the time of the forms."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 16
"""A variable's value that is shorter may be a word that is in the file for another reason."""


class SecretFound(PlanError):
    """A file that would be published holds a secret. The message says where and what, never the secret."""


def require_no_secrets(contents: Iterable[PushContent], environment: Mapping[str, str] = os.environ) -> None:
    """Return if no file holds a secret. Raises `SecretFound` for the first one that does.

    Of safetensors files the metadata is looked at, not the weights.
    """
    own = {
        value.strip().encode(): name
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST and not os.path.exists(value)  # noqa: PTH110
    }
    for content in contents:
        for text in _texts(content):
            what = _secret_in(text, own)
            if what is not None:
                line = text.count(b"\n", 0, what[1]) + 1
                raise SecretFound(
                    f"{content.source or content.name}: line {line} holds a secret ({what[0]}); nothing was pushed",
                    hint="remove it from the file and revoke it, as others may know it already",
                )


def _secret_in(text: bytes, own: Mapping[bytes, str]) -> tuple[str, int] | None:
    for kind, begins, form in _FORMS:
        for begin in begins:
            at = text.find(begin)
            while at >= 0:
                if form.match(text, at):
                    return kind, at
                at = text.find(begin, at + 1)
    for value, name in own.items():
        at = text.find(value)
        if at >= 0:
            return f"the value of ${name}", at
    return None


def _texts(content: PushContent) -> Iterator[bytes]:
    if content.data is not None:
        yield content.data
    elif content.source is not None and content.name.endswith(".safetensors"):
        try:
            metadata = scan_file(content.source).metadata
        except CorruptFile:
            return
        yield "\n".join(f"{key}: {value}" for key, value in metadata.items()).encode("utf-8", "surrogatepass")
    elif content.source is not None:
        yield content.source.read_bytes()

"""Finding secrets in what would be published: by their form, and the values of this process's own variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from lora_tool.errors import CorruptFile, PlanError
from lora_tool.formats.safetensors import scan_file
from lora_tool.hub.model import Content

_KINDS: tuple[tuple[str, str], ...] = (
    ("Hugging Face token", r"\bhf_(?:[A-Za-z0-9]{30,}|(?:jwt|oauth)_[\w.\-]{20,})"),
    ("AWS key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,})"),
    ("GitLab token", r"\bglpat-[\w\-]{20,}"),
    ("OpenAI or Anthropic key", r"\bsk-(?:ant-|proj-|svcacct-)?[A-Za-z0-9_\-]{32,}"),
    ("Slack token", r"\bxox[abeprs]-[\w\-]{10,}"),
    ("Google key", r"\bAIza[\w\-]{35}"),
    ("Weights & Biases key", r"(?i:wandb_api_key|api\.wandb\.ai)[^\n]{0,40}?\b[0-9a-f]{40}\b"),
    ("JSON web token", r"\beyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]{10,}"),
    ("private key", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----"),
)
_PATTERN = re.compile("|".join(f"(?P<k{at}>{form})" for at, (_, form) in enumerate(_KINDS)).encode())
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 16
"""A variable's value that is shorter may be a word that is in the file for another reason."""


class SecretFound(PlanError):
    """A file that would be published holds a secret. The message says where and what, never the secret."""


def require_no_secrets(contents: Iterable[Content], environment: Mapping[str, str] = os.environ) -> None:
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
                    hint="take it out of the file and revoke it: it may be known to others already",
                )


def _secret_in(text: bytes, own: Mapping[bytes, str]) -> tuple[str, int] | None:
    match = _PATTERN.search(text)
    if match is not None and match.lastgroup is not None:
        return _KINDS[int(match.lastgroup[1:])][0], match.start()
    for value, name in own.items():
        at = text.find(value)
        if at >= 0:
            return f"the value of ${name}", at
    return None


def _texts(content: Content) -> Iterator[bytes]:
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

"""How people write a repository of the Hub: `owner/name`, `owner/name@revision`, `hf://…`, or the address of its page."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from lora_tool.core.errors import WrongValue

URI = "hf://"
FORMS = "owner/name, owner/name@revision, hf://owner/name@revision or its address https://huggingface.co/owner/name"
"""The forms, for an error."""
ANYWHERE = "path, Hub id (owner/name[@revision]), hf:// or URL"
"""What a model or an adapter can be given as, for a help text."""

_WORD = r"(?a:\w[\w.\-]*)"
_NAME = re.compile(rf"(?P<id>{_WORD}(?:/{_WORD})?)(?:@(?P<revision>[\w.\-/]+))?\Z")
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SCHEMES = ("https://", "http://")
_REF = r"refs/\w+/[\w.\-]+"
_WITH_REVISION = ("tree", "blob", "resolve", "raw", "commit", "commits")
_WHOLE = 2
_NOT_IN_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{")


class HubName(Struct, frozen=True, kw_only=True):
    """A repository, `owner/name` or an old `name` without owner, and a branch, tag or commit (None for main)."""

    id: str
    revision: str | None = None

    @property
    def has_owner(self) -> bool:
        """Whether it is `owner/name`: a bare `name` is more often a mistyped path."""
        return "/" in self.id


def is_address(reference: str) -> bool:
    """Return whether `reference` is meant for the Hub alone: `hf://…`, or the address of a page."""
    return reference.startswith(URI) or _has_scheme(reference) or _is_host(reference.partition("/")[0])


def hub_name(reference: str) -> HubName | None:
    """Return the repository of models that `reference` names if it is one of the Hub's, None for anything else."""
    if not reference.startswith(URI) and is_address(reference):
        return _of_page(reference)
    match = _NAME.match(reference.removeprefix(URI))
    return HubName(id=match["id"], revision=match["revision"]) if match else None


def require_ref_name(name: str, what: str) -> None:
    """Return if git allows a branch or tag of that name (git-check-ref-format). Raises `WrongValue`, about `what`."""
    odd = _NOT_IN_REF.search(name) or name.endswith(".") or name.startswith("-") or name == "@"
    if odd or any(not part or part.startswith(".") or part.endswith(".lock") for part in name.split("/")):
        raise WrongValue(f"{what}: expected a name that git allows, such as v1.0, found {name!r}")


def hub_id_of(reference: str) -> str | None:
    """Return `owner/name` where `reference` names such a repository if no such folder is here; None for a mere path."""
    named = hub_name(reference)
    return named.id if named is not None and named.has_owner else None


def _of_page(address: str) -> HubName | None:
    """Return the repository whose page it is: `/owner/name`, `/owner/name/tree/REVISION`, or of a file in it."""
    page = urlsplit(address if _has_scheme(address) else f"https://{address}")
    parts = [unquote(part) for part in page.path.strip("/").split("/")]
    if not _is_host(page.netloc) or len(parts) < _WHOLE:
        return None
    match = _NAME.match("/".join(parts[:_WHOLE]))
    if match is None or match["revision"] or parts[0] in ("datasets", "spaces", "docs", "collections", "papers"):
        return None
    if len(parts) == _WHOLE or parts[_WHOLE] not in _WITH_REVISION:
        return HubName(id=match["id"])
    rest = "/".join(parts[_WHOLE + 1 :])
    ref = re.match(_REF, rest)
    revision = ref[0] if ref else rest.partition("/")[0]
    inner_folder = parts[_WHOLE] == "tree" and rest != revision
    return None if inner_folder else HubName(id=match["id"], revision=revision or None)


def _has_scheme(reference: str) -> bool:
    return reference[:8].lower().startswith(_SCHEMES)


def _is_host(host: str) -> bool:
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    return bool(host) and host.lower() in (*_HOSTS, endpoint)

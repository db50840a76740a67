"""Reading the Hub: what a repository holds at one commit, and what the base model's card says."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import ModelInfo, RepoFile

from lora_tool.core.errors import HubError, HubRefused
from lora_tool.hub.card import Licence, read_card
from lora_tool.hub.contents import README
from lora_tool.hub.model import Remote
from lora_tool.hub.options import MAIN
from lora_tool.hub.session import Session

_LICENCE_KEYS = ("license", "license_name", "license_link")


def read_remote(
    session: Session, repo: str, revision: str = MAIN, *, readme: bool = True, tags: bool = False
) -> Remote:
    """Return what the repository holds at `revision`, all from one commit; without a head where it is not to be seen.

    A branch that does not exist yet is read as main, from where it will start. Raises `HubError`.
    """
    found = session.ask(lambda: _info(session, repo, revision))
    exists = found is not None
    if found is None and revision != MAIN:
        found = session.ask(lambda: _info(session, repo, MAIN))
    if found is None:
        return Remote(repo=repo, revision=revision, branch_exists=revision == MAIN)
    head = found.sha or ""
    files = read_tree(session, repo, head)
    by_name = revision not in (MAIN, head) and not revision.startswith("refs/")
    refs = session.ask(lambda: session.api.list_repo_refs(repo)) if tags or (exists and by_name) else None
    if exists and (revision == head or (by_name and refs and revision not in {ref.name for ref in refs.branches})):
        raise HubRefused(
            f"{repo}: {revision} is a tag or a commit, and only a branch can be pushed to",
            hint="name a branch: `revision=main`, or a new name",
        )
    return Remote(
        repo=found.id,
        revision=revision,
        head=head,
        private=found.private,
        branch_exists=exists,
        files=files,
        tags={tag.name: tag.target_commit for tag in refs.tags} if refs is not None else {},
        readme=_readme(session, repo, head) if readme and README in files else None,
    )


def read_tree(session: Session, repo: str, commit: str) -> Mapping[str, RepoFile]:
    """Return all files of one commit. Raises `HubError`."""
    listed = session.ask(lambda: list(session.api.list_repo_tree(repo, recursive=True, revision=commit)), retry=False)
    return {file.path: file for file in listed if isinstance(file, RepoFile)}


def head_commit(session: Session, repo: str, revision: str) -> str | None:
    """Return the commit that the revision names now; None where there is no such repository or revision."""
    found = session.ask(lambda: _info(session, repo, revision))
    return found.sha if found is not None else None


def read_licence(session: Session, base: str | None, folder: Path | None) -> tuple[str | None, Licence]:
    """Return the base model's id as the Hub spells it and its licence, from the Hub's card or the folder's.

    An old id without owner (`gpt2`) that the Hub does not know is taken for a folder's name, and gives None.
    """
    metadata = _folder_licence(folder)
    if base is None:
        return None, Licence(metadata=metadata)
    try:
        found = session.ask(lambda: _info(session, base, None))
    except HubError:
        found = None
    if found is None:
        return (base if "/" in base or metadata else None), Licence(metadata=metadata)
    declared = {key: value for key in _LICENCE_KEYS if (value := getattr(found.card_data, key, None))}
    return found.id, Licence(metadata=declared or metadata, gated=bool(found.gated))


def _info(session: Session, repo: str, revision: str | None) -> ModelInfo | None:
    try:
        return session.api.model_info(repo, revision=None if revision == MAIN else revision)
    except hub_errors.GatedRepoError:
        raise
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError):
        return None


def _readme(session: Session, repo: str, commit: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="lora-tool-") as folder:
        path = session.ask(
            lambda: session.api.hf_hub_download(repo, README, revision=commit, local_dir=folder), retry=False
        )
        return Path(path).read_bytes()


def _folder_licence(folder: Path | None) -> dict[str, object]:
    if folder is None or not (folder / README).is_file():
        return {}
    try:
        metadata = read_card((folder / README).read_bytes(), str(folder / README)).metadata
    except (OSError, ValueError):
        return {}
    return {key: metadata[key] for key in _LICENCE_KEYS if metadata.get(key)}

"""Deciding what a push will do: pure once the folder and the repository are read, and changing nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from huggingface_hub import get_token
from huggingface_hub.hf_api import RepoFile
from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.checkpoints.hub_client.failures import PLANNING
from lora_tool.core.errors import HubConflict, HubRefused, HubUnreachable, VerificationFailed
from lora_tool.core.progress import Progress
from lora_tool.core.report import Report, Severity
from lora_tool.formats import adapter_config, manifest
from lora_tool.formats.manifest import Manifest, read_manifest
from lora_tool.hub.card import merge_card, section_text
from lora_tool.hub.contents import README, pushable, read_readme, require_no_secrets, without_paths
from lora_tool.hub.contents import select as selected
from lora_tool.hub.hashing import content_sha256, hashes_of, in_parallel
from lora_tool.hub.model import PushContent, PushFile, PushPlan, Remote, UploadAction
from lora_tool.hub.options import MAIN, PushOptions, Readme
from lora_tool.hub.origin import Origin, origin_of
from lora_tool.hub.remote import read_licence, read_remote
from lora_tool.hub.session import session
from lora_tool.verification.validating import validate

_SHARD = re.compile(r"(?:model-\d{5}-of-\d{5}\.safetensors|model\.safetensors(?:\.index\.json)?)\Z")
_ADAPTER_CONFIG = re.compile(rf"{re.escape(adapter_config.FILE_NAME)}\Z")
_SHOWN_FINDINGS = 5
_MODEL_WEIGHTS = re.compile(rf"{_SHARD.pattern[:-2]}\Z|pytorch_model(?:-\d{{5}}-of-\d{{5}})?\.bin\Z")


def plan_push(
    folder: str | os.PathLike[str],
    repo: str,
    options: PushOptions,
    *,
    unseen: bool = False,
    progress: Progress | None = None,
) -> PushPlan:
    """Return the plan that publishes `folder` as the model repository `repo`. Reads both and changes neither.

    The folder is validated first, an adapter with its base if that is on this disk; a finding of severity `fail_on` or
    worse refuses the push. The files are searched for secrets. Local files are hashed only where the Hub has one of the
    same name and size; `progress` is called with the bytes. Where the Hub cannot be reached, `unseen` plans for an empty
    repository, with a warning. Raises `WrongValue` for a branch or tag that git does not
    allow, `FindingsFound`, `CheckpointError`, `PlanError`, `HubError`.
    """
    readme, tag, private = Readme(options.readme), options.tag, options.private
    checkpoint = pushable(open_checkpoint(folder))
    report = validate(checkpoint, select=options.select, ignore=options.ignore)
    report.raise_at(Severity(options.fail_on))
    written = _manifest_of(checkpoint)
    _require_not_found_wrong(checkpoint, written)
    contents, left_out = selected(checkpoint, options.include)
    local_readme = read_readme(checkpoint)
    with session(repo, progress=False, doing=PLANNING) as opened:
        try:
            full_name = repo if "/" in repo else f"{opened.ask(opened.api.whoami)['name']}/{repo}"
            remote = read_remote(opened, full_name, options.revision or MAIN, tags=tag is not None)
            not_compared: tuple[str, ...] = ()
        except HubUnreachable as error:
            if not unseen:
                raise
            full_name, remote = repo, Remote(repo=repo, revision=options.revision or MAIN)
            not_compared = (f"this is the plan for an empty repository: {error}",)
        _require_room(checkpoint, remote, private=private, create_pr=options.create_pr)
        origin = origin_of(checkpoint, written)
        base, licence = read_licence(opened, origin.base, origin.base_folder)
    origin = replace(origin, base=base)
    kind = f"{'reward ' if origin.reward else ''}{'adapter' if origin.adapter else 'model'}"
    card = merge_card(
        local_readme,
        None if readme is Readme.LOCAL and local_readme is not None else remote.readme,
        origin=origin,
        section=section_text(checkpoint, written, origin),
        licence=licence,
        title=full_name.rpartition("/")[2],
        readme=readme,
    )
    contents = [without_paths(content, origin) for content in contents]
    contents.append(PushContent(name=README, data=card.data, reason=f"model card: {card.reason}"))
    words = PushContent(name="the commit's message", data=f"{options.message or ''}\n{tag or ''}".encode())
    require_no_secrets([*contents, words])
    files = file_changes(contents, remote.files, progress=progress)
    return PushPlan(
        folder=checkpoint.root,
        kind=kind,
        remote=remote,
        private=None if remote.exists else private is not False,
        files=(*files, *_orphans(checkpoint, contents, remote.files)),
        left_out=tuple(left_out),
        message=options.message or f"Upload {kind} with lora-tool",
        create_pr=options.create_pr,
        tag=tag,
        notes=_notes(remote, private=private),
        warnings=(
            *not_compared,
            *card.warnings,
            *_warnings(checkpoint, report, origin, gated_made_public=licence.gated and private is False),
        ),
    )


def file_changes(
    contents: Iterable[PushContent], there: Mapping[str, RepoFile], *, progress: Progress | None = None
) -> tuple[PushFile, ...]:
    """Return what happens to each file, by size and hash; only files of the same size on both sides are read."""
    return in_parallel(lambda each, read: _file_change(each, there.get(each.name), read), tuple(contents), progress)


def _orphans(
    checkpoint: AdapterDir | ModelDir, contents: Iterable[PushContent], there: Mapping[str, RepoFile]
) -> tuple[PushFile, ...]:
    """Return the weight files of an older push that this one does not replace: transformers could load them instead."""
    if isinstance(checkpoint, AdapterDir):
        return ()
    kept = {content.name for content in contents}
    return tuple(
        PushFile(name=name, change=UploadAction.REMOVE, size=file.size, reason="weights of an older push")
        for name, file in sorted(there.items())
        if _SHARD.match(name) and name not in kept
    )


def _file_change(content: PushContent, there: RepoFile | None, progress: Progress) -> PushFile:
    change = UploadAction.ADD if there is None else UploadAction.UPDATE
    digest = None
    if there is not None and there.size == content.size:
        digest = content_sha256(content, progress)
        wanted, found = hashes_of(content, there, digest)
        change = UploadAction.SAME if found == wanted else change
    return PushFile(
        name=content.name, change=change, size=content.size, reason=content.reason, content=content, sha256=digest
    )


def _warnings(
    checkpoint: AdapterDir | ModelDir, report: Report, origin: Origin, *, gated_made_public: bool
) -> Iterator[str]:
    yield from map(str, report.at_least(Severity.WARNING)[:_SHOWN_FINDINGS])
    if get_token() is None:
        yield "no token is set, and the Hub refuses a push without one: hf auth login, or set HF_TOKEN"
    if isinstance(checkpoint, ModelDir) and checkpoint.config is not None and checkpoint.config.custom_code:
        yield "config.json names custom code (auto_map): --include '*.py' pushes it"
    if origin.adapter and origin.local:
        yield (
            f"adapter_config.json names {origin.local}, which is not a Hub id: other users must give the base "
            "themselves"
        )
    if gated_made_public:
        yield f"the base model {origin.base} is gated: check that its licence lets you publish derived models"


def _require_room(checkpoint: AdapterDir | ModelDir, remote: Remote, *, private: bool | None, create_pr: bool) -> None:
    """Return if the repository can take what is pushed. Raises `HubConflict`, `HubRefused`."""
    if create_pr and not remote.exists:
        raise HubRefused(
            f"{remote.repo} does not exist, or the token may not see it, so no pull request can be opened",
            hint="push without `create_pr=True` to create it",
        )
    if private is True and remote.private is False:
        raise HubConflict(
            f"{remote.repo} exists and is public, but `private=True` was requested; nothing was pushed",
            hint=f"hf repos settings {remote.repo} --private, or push to another name",
        )
    is_adapter = isinstance(checkpoint, AdapterDir)
    # a repository loads as the other kind with such a file: transformers applies an adapter that it finds
    other_kind = _MODEL_WEIGHTS if is_adapter else _ADAPTER_CONFIG
    in_the_way = next(filter(other_kind.match, sorted(remote.files)), None)
    if in_the_way is not None:
        there, here = ("a model", "an adapter") if is_adapter else ("an adapter", "a model")
        raise HubConflict(
            f"{remote.repo} holds {there} ({in_the_way}), but this is {here}: together neither would load correctly",
            hint=f"push to another repository, or first run: hf repos delete-files {remote.repo} {in_the_way}",
        )


def _require_not_found_wrong(checkpoint: AdapterDir | ModelDir, written: Manifest | None) -> None:
    """Raise `VerificationFailed` where the manifest records that a check of these weights failed."""
    entry = written.raw.get("verification") if written is not None else None
    errors = entry.get("errors") if isinstance(entry, Mapping) else None
    if isinstance(errors, int) and errors > 0:
        raise VerificationFailed(
            f"{checkpoint.root}: {manifest.FILE_NAME} records a verification with {errors} errors; nothing was pushed",
            hint=f"lora-tool verify {shlex.quote(str(checkpoint.root))}",
        )


def _manifest_of(checkpoint: AdapterDir | ModelDir) -> Manifest | None:
    if isinstance(checkpoint, ModelDir):
        return checkpoint.manifest
    found = manifest.FILE_NAME in checkpoint.folder.files
    return read_manifest(checkpoint.root / manifest.FILE_NAME) if found else None


def _notes(remote: Remote, *, private: bool | None) -> tuple[str, ...]:
    if not remote.exists:
        visibility = {None: "private (the default; --public changes it)", True: "private", False: "public"}[private]
        return (f"{remote.repo} will be created, {visibility}",)
    shown = "private" if remote.private else "public"
    unchanged = "; --public does not change that" if private is False and remote.private else ""
    branch = "" if remote.branch_exists else f"; branch {remote.revision} will be created from main"
    return (f"{remote.repo} exists and is {shown}{unchanged}{branch}",)

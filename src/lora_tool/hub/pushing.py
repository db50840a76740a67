"""Carrying a push out: the repository if it is missing, one commit on a pinned parent, then the comparison."""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from msgspec import Struct

from lora_tool.core.errors import HubConflict, HubError, HubRefused, HubUnreachable
from lora_tool.core.options import named_in_errors
from lora_tool.hub.hashing import check_download, check_tree, mismatches, require_unchanged, with_hashes
from lora_tool.hub.model import Pushed, PushFile, PushPlan, Remote
from lora_tool.hub.options import MAIN, PushCheck
from lora_tool.hub.remote import head_commit, read_remote, read_tree
from lora_tool.hub.session import Session, session

_CREATED_BY_THE_HUB = {".gitattributes"}
_LOST = "the Hub's answer was lost, but the commit is on the Hub and complete"


class _Landed(Struct, frozen=True, kw_only=True):
    """A commit that is on the Hub."""

    commit: str
    pull_request: str | None = None
    notes: tuple[str, ...] = ()
    changed: bool = True


@named_in_errors
def push(plan: PushPlan, *, check: PushCheck | str = PushCheck.TREE, progress: bool = False) -> Pushed:
    """Carry out `plan` and return the result. `progress` shows huggingface_hub's bars on stderr.

    Makes one commit on the parent that the plan was made from, or none if nothing changes; then compares every file of
    the plan at that commit: its hash in the tree, or with `check` "download" its bytes. Raises `SourceChanged`,
    `HubError`, and `VerificationFailed` if the Hub holds something else than was sent. After Ctrl-C the repository has
    either the whole commit or none of it.
    """
    check = PushCheck(check)
    _require_unchanged(plan)
    plan = with_hashes(plan)
    repo = plan.remote.repo
    with session(repo, progress=progress) as opened:
        remote = _prepared(opened, plan)
        landed = _commit(opened, plan, remote)
        tree = read_tree(opened, repo, landed.commit)
        check_tree(plan, tree, landed.commit)
        if check is PushCheck.DOWNLOAD:
            # the folder belongs to this thread: it goes on Ctrl-C, too, while a download may still be writing into it
            with tempfile.TemporaryDirectory(prefix="lora-tool-", ignore_cleanup_errors=True) as folder:
                opened.work(lambda: check_download(opened.api, plan, landed.commit, Path(folder)))
        if plan.tag is not None:
            _tag(opened, plan, landed.commit)
        notes = (*landed.notes, *opened.warnings)
    return Pushed(
        repo=repo,
        url=f"{constants.ENDPOINT}/{repo}",
        commit=landed.commit,
        changed=landed.changed,
        files=plan.files,
        created=not plan.remote.exists,
        pull_request=landed.pull_request,
        tag=plan.tag,
        check=check,
        notes=notes,
    )


def _require_unchanged(plan: PushPlan) -> None:
    for file in plan.files:
        if file.content is not None:
            require_unchanged(file.content)


def _prepared(opened: Session, plan: PushPlan) -> Remote:
    remote = plan.remote
    if plan.private is not None:
        remote = _created(opened, remote, private=plan.private)
    if plan.tag is not None and plan.changes and plan.tag in remote.tags:
        raise HubConflict(
            f"{remote.repo}: tag {plan.tag} exists already, on {remote.tags[plan.tag][:12]}; nothing was pushed",
            hint=f"choose another `tag=TAG`, or first run: hf repos tag delete {remote.repo} {plan.tag}",
        )
    if not remote.branch_exists and not plan.create_pr:
        head = remote.head
        opened.ask(lambda: opened.api.create_branch(remote.repo, branch=remote.revision, revision=head, exist_ok=True))
    return remote


def _created(opened: Session, planned: Remote, *, private: bool) -> Remote:
    """Create the repository and return it. One that somebody made meanwhile is taken only if it is empty."""
    repo = planned.repo
    with contextlib.suppress(HubConflict):  # it is there: what it holds decides
        opened.ask(lambda: opened.api.create_repo(repo, private=private))
    remote = read_remote(opened, repo, planned.revision, readme=False)
    if not remote.exists:
        raise HubRefused(
            f"{repo} exists, but the token may not see it", hint="use a token of its owner, or push to another name"
        )
    if set(remote.files) - _CREATED_BY_THE_HUB or (private and remote.private is False):
        raise HubConflict(
            f"somebody else created {repo} while this push ran", hint="look at the repository, then push again"
        )
    return remote


def _commit(opened: Session, plan: PushPlan, remote: Remote) -> _Landed:
    if remote.head is None:
        raise AssertionError("the repository was prepared")
    if not plan.changes:
        return _Landed(commit=remote.head, changed=False)
    if plan.create_pr:
        earlier = _find_pull_request(opened, plan)
        if earlier is not None:
            return earlier
    operations = [_operation(file) for file in plan.changes]
    additions = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
    opened.work(
        lambda: opened.api.preupload_lfs_files(
            remote.repo, additions, revision=remote.revision, create_pr=plan.create_pr, free_memory=False
        )
    )
    _require_none_ignored(remote.repo, additions)
    _require_unchanged(plan)

    def commit() -> _Landed:
        done = opened.api.create_commit(
            remote.repo,
            operations,
            commit_message=plan.message,
            revision=remote.revision,
            create_pr=plan.create_pr,
            parent_commit=remote.head,
        )
        return _Landed(commit=done.oid, pull_request=done.pr_url)

    # no answer is no failure: the commit may be there
    return opened.ask(
        lambda: opened.work(commit), retry=not plan.create_pr, despite=partial(_find, opened, plan, remote)
    )


def _operation(file: PushFile) -> CommitOperationAdd | CommitOperationDelete:
    if file.content is None:
        return CommitOperationDelete(file.name, is_folder=False)
    content = file.content
    operation = CommitOperationAdd(file.name, content.source if content.source is not None else content.data or b"")
    if file.sha256 is not None:
        operation.upload_info.sha256 = bytes.fromhex(file.sha256)
    return operation


def _require_none_ignored(repo: str, additions: list[CommitOperationAdd]) -> None:
    """Return if the repository's `.gitignore` lets every file in: the client leaves ignored ones out silently."""
    ignored = [addition.path_in_repo for addition in additions if getattr(addition, "_should_ignore", False)]
    if ignored:
        raise HubRefused(
            f"{repo}: the repository's .gitignore excludes {', '.join(ignored[:3])}; nothing was committed",
            hint="remove the line from the repository's .gitignore",
        )


def _find(opened: Session, plan: PushPlan, remote: Remote, failure: BaseException) -> _Landed | None:
    """Return the commit if it is on the Hub after all; None where HEAD did not move. Raises `HubConflict`."""
    if not isinstance(failure, HubUnreachable | HubConflict):
        return None
    if plan.create_pr:
        return _find_pull_request(opened, plan, notes=(_LOST,))
    try:
        head = head_commit(opened, remote.repo, remote.revision)
        if head is None or head == remote.head:
            return None
        tree = read_tree(opened, remote.repo, head)
    except HubError:
        return None
    if not mismatches(plan, tree):
        return _Landed(commit=head, notes=(_LOST,) if isinstance(failure, HubUnreachable) else ())
    raise HubConflict(
        f"{remote.repo} was changed while this push ran: expected {(remote.head or '')[:12]}, found {head[:12]}",
        hint="look at the new commit, then run the same command again",
    ) from failure


def _find_pull_request(opened: Session, plan: PushPlan, notes: tuple[str, ...] = ()) -> _Landed | None:
    """Return the open pull request that holds exactly this content, if there is one."""
    repo = plan.remote.repo
    try:
        listed = opened.ask(
            lambda: list(
                opened.api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
            )
        )
        for num in (pull.num for pull in listed if pull.title == plan.message):
            head = head_commit(opened, repo, f"refs/pr/{num}")
            if head is not None and not mismatches(plan, read_tree(opened, repo, head)):
                url = f"{constants.ENDPOINT}/{repo}/discussions/{num}"
                return _Landed(commit=head, pull_request=url, notes=notes, changed=bool(notes))
    except HubError:
        return None
    return None


def _tag(opened: Session, plan: PushPlan, commit: str) -> None:
    """Tag the commit. A tag of that name on this very commit is what was asked for. Raises `HubConflict`."""
    repo, tag = plan.remote.repo, plan.tag or ""
    try:
        opened.ask(lambda: opened.api.create_tag(repo, tag=tag, revision=commit))
    except HubConflict as conflict:
        there = read_remote(opened, repo, MAIN, readme=False, tags=True).tags.get(tag)
        if there != commit:
            raise HubConflict(
                f"{repo}: tag {tag} exists already, on {(there or 'another commit')[:12]}; the files were pushed in "
                f"{commit[:12]}",
                hint="choose another `tag=TAG` and push again; that makes no second commit",
            ) from conflict

"""What the Hub of the tests keeps: repositories as commits of named blobs, branches, tags and pull requests."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

_COUNTER = itertools.count(1)


@dataclass(frozen=True)
class Blob:
    """A file's content. `lfs` for those that the Hub keeps outside of git; `claimed` is the sha256 it was told."""

    content: bytes
    lfs: bool = False
    claimed: str | None = None
    size_: int | None = None
    xet_hash: str | None = None

    @property
    def size(self) -> int:
        return len(self.content) if self.size_ is None else self.size_

    @property
    def sha256(self) -> str:
        return self.claimed or hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Git's name of the blob; of an LFS file that is its pointer's."""
        content = f"version lfs\noid sha256:{self.sha256}\nsize {self.size}\n".encode() if self.lfs else self.content
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    tree: Mapping[str, Blob]


@dataclass
class PullRequest:
    num: int
    title: str
    oid: str
    status: str = "open"


@dataclass
class Repo:
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, PullRequest] = field(default_factory=dict)
    card: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.add_commit(None, "initial commit", {".gitattributes": Blob(b"*.safetensors filter=lfs\n")})
        self.branches["main"] = first.oid

    def add_commit(self, parent: str | None, title: str, tree: Mapping[str, Blob]) -> Commit:
        oid = hashlib.sha1(f"{self.id} {title} {parent} {next(_COUNTER)}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, dict(tree))
        return self.commits[oid]

    def commit_files(self, files: Mapping[str, bytes], *, title: str = "by somebody else", branch: str = "main") -> str:
        """Commit as another user would: the tests' way to move HEAD."""
        head = self.commits[self.branches[branch]]
        blobs = {name: Blob(data, lfs=name.endswith((".safetensors", ".bin"))) for name, data in files.items()}
        commit = self.add_commit(head.oid, title, {**head.tree, **blobs})
        self.branches[branch] = commit.oid
        return commit.oid

    def resolve(self, revision: str) -> Commit | None:
        """Return the commit of a branch, tag, pull request or oid."""
        if revision.startswith("refs/pr/"):
            pull = self.pulls.get(int(revision.rpartition("/")[2]))
            return self.commits[pull.oid] if pull else None
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(oid)

    @property
    def head(self) -> Commit:
        return self.commits[self.branches["main"]]

    @property
    def history(self) -> list[str]:
        """Titles from main's HEAD to the first commit."""
        titles, commit = [], self.head
        while True:
            titles.append(commit.title)
            if commit.parent is None:
                return titles
            commit = self.commits[commit.parent]

    def files(self, revision: str = "main") -> dict[str, bytes]:
        commit = self.resolve(revision)
        assert commit is not None
        return {name: blob.content for name, blob in commit.tree.items() if name != ".gitattributes"}

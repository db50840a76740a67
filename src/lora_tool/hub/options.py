"""The options of a push, declared once."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from lora_tool.core.choices import Choice, flag
from lora_tool.core.errors import WrongValue
from lora_tool.core.hub_names import require_ref_name
from lora_tool.core.options import Options, Section, option
from lora_tool.rules.options import RuleOptions

MAIN = "main"


@enum.unique
class PushCheck(Choice):
    """How a push is checked afterwards: by the hashes that the Hub lists, or by reading every file back."""

    TREE = "tree"
    DOWNLOAD = "download"


@enum.unique
class Readme(Choice):
    """Which README a push keeps if those of the folder and the Hub differ."""

    AUTO = "auto"
    LOCAL = "local"
    HUB = "hub"


@dataclass(frozen=True, kw_only=True)
class BranchOptions(Options):
    """How a repository is created, and which branch gets the commit. Raises `WrongValue` for a name that git refuses."""

    section = Section.HUB

    private: bool | None = option(
        None,
        "Visibility of a repository that push creates.  [default: private; an existing one stays as it is]",
        parse=flag,
        off="public",
    )
    revision: str | None = option(
        None, "Branch to push to; created from main if it does not exist.  [default: main]", metavar="BRANCH"
    )
    create_pr: bool = option(default=False, text="Open a pull request instead of committing to the branch.", parse=flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.revision is not None:
            require_ref_name(self.revision, "revision")


@dataclass(frozen=True, kw_only=True)
class PushOptions(RuleOptions, BranchOptions):
    """The options of a push. Raises `WrongValue` for a tag or a message that no commit can have."""

    tag: str | None = option(None, "Tag the commit.", metavar="TAG")
    message: str | None = option(None, "Title of the commit.  [default: Upload … with lora-tool]", metavar="TEXT")
    include: Iterable[str] = option(
        (), "Also push these files of the folder: 'plots/*.png'.", metavar="PATTERN", many=True
    )
    readme: Readme | str = option(
        Readme.AUTO, "README.md to start from; auto keeps edits made on the Hub.", parse=Readme
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tag is not None:
            require_ref_name(self.tag, "tag")
            if self.create_pr:
                raise WrongValue(
                    "`tag=TAG` with `create_pr=True`: a pull request has no commit to tag before it is merged"
                )
        if self.message is not None and not self.message.strip():
            raise WrongValue("`message=TEXT` is empty")

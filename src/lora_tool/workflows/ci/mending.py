"""What of a broken checkpoint its rank files can mend."""

from __future__ import annotations

from collections.abc import Iterable

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, open_sharded
from lora_tool.core.errors import CheckpointError
from lora_tool.core.report.findings import Finding
from lora_tool.rules.consolidating import is_about_rank_files


def has_rank_files(opened: Checkpoint) -> bool:
    """Return whether weights that lie in the folder also lie there in pieces, as training saved them."""
    if not isinstance(opened, AdapterDir | ModelDir):
        return False
    try:
        return open_sharded(opened.root).root == opened.root
    except CheckpointError:
        return False


def curable(findings: Iterable[Finding]) -> bool:
    """Return whether rank files can mend what was found: everything but faults of their own."""
    return all(not is_about_rank_files(finding) for finding in findings)

"""A training program's state in one torch file of any name, as `dcp_to_torch` writes it, the module under a key."""

from __future__ import annotations

import re

from lora_tool.checkpoints import other_formats
from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, ShardedDir, ShardedKind

_TORCH_FILE = re.compile(r".+\.(bin|pt|pth)\Z")
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|optim|scheduler|lr_scheduler|scaler|rng_state|random_states|extra_state|sampler|common"
    r"|dl_sampler|ema|value_head|v_head|reward_head|mm_projector|non_lora|layer_|mp_rank|zero_|bf16_|fp16_|expp_rank"
    r"|recipe_state|dataloader)\w*.*\Z"
)
"""Files that trainers write next to weights, and pieces of other programs."""


def _candidates(folder: Folder) -> tuple[str, ...]:
    """Return the torch files that may hold a state, where no other weights and no folders lie in the folder."""
    if folder.folders:  # checkpoints may lie in them
        return ()
    whole = (
        name.startswith(("adapter_model", "model.safetensors", "model-0", "pytorch_model")) for name in folder.files
    )
    if any(whole) or any(name.endswith(".safetensors") for name in folder.files):
        return ()
    return tuple(
        name
        for name in folder.files
        if _TORCH_FILE.match(name) and not _NO_WEIGHTS.match(name) and not other_formats.is_known(name)
    )


def _recognise(folder: Folder) -> Claim | None:
    return Claim.CONFIG if len(_candidates(folder)) == 1 else None


def _open(folder: Folder) -> ShardedDir:
    return ShardedDir(kind=STATE_FILE, folder=folder, rank_files={".": _candidates(folder)}, problems=folder.problems)


STATE_FILE = ShardedKind(
    name="training state in one file", sign="state.pt", landmarks=(), weights=(), recognise=_recognise, open=_open
)

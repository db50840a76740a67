"""What one process sees of its trainings: printed as it comes, and written for the command that waits for it."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lora_tool.core.display import printable
from lora_tool.core.report import Finding, Severity
from lora_tool.core.report.text import by_rule
from lora_tool_train.job import FOLDER_VARIABLE, TrainingJob, TrainingOutcome, TrainingStatus, read_job, write_outcome
from lora_tool_train.traps import TrainingStopped, as_typed, trap

_DATA = "dataset_name: a Hub id, or a folder of files; for one file datasets: [{path: json, data_files: FILE}]"
_NAME = "model_name_or_path and dataset_name: a folder that is there, or a Hub id of the form owner/name"
_TARGETS = "lora_target_modules: all-linear; TRL reads a single name as a regular expression: .*q_proj"
_HINTS = {
    "use_cpu": "torch sees no GPU here; to train on the CPU: use_cpu: true and bf16: false",
    "find any data file": _DATA,
    "Couldn't reach": _DATA,
    "doesn't exist on the Hub": _NAME,
    "is not a valid model identifier": _NAME,
    "Repo id must": _NAME,
    "Target modules": _TARGETS,
    "No modules were targeted": _TARGETS,
    "No module named": "install it; or, for a module of reward_funcs, run this in the folder that holds it",
    "KeyError: 'test'": "dataset_test_split: a split that the data has, or eval_strategy: no",
    "chat_template is not set": "an instruct model has a template; for sft and reward chat_template_path: a folder or "
    "Hub id takes that of another; or rows of plain text need none",
    "not training-compatible": "assistant_only_loss: false; or chat_template_path: a template that marks the answers "
    "with {% generation %}",
    "the dataset is not conversational": "assistant_only_loss: false; of rows with prompt and completion the answers "
    "alone are labels as it is",
    "prepare_inputs_for_generation": "lora_task_type: SEQ_CLS, as a reward model generates nothing",
    "size mismatch for": "resume with the options of the checkpoint: lora_r and lora_target_modules are in its "
    "adapter_config.json",
    "size of optimizer's group": "resume with the options of the checkpoint: lora_target_modules and lora_modules_to_save "
    "are in its adapter_config.json",
    "No space left on device": "free space on the disk of output_dir, then continue with --resume auto",
    "out of memory": "a smaller per_device_train_batch_size with more gradient_accumulation_steps, or a shorter max_length",
}
"""Words of TRL's, transformers' and PEFT's errors → the line that helps."""
_COLUMNS = "rename or add columns: https://huggingface.co/docs/trl/dataset_formats has what each method reads"
_FRAMES = {
    "_calculate_rewards": "the error is a reward function's: it gets completions as text, as messages where the prompts "
    "are messages, and every other column by its name",
    "apply_chat_template": "the template cannot take the messages of a row: none may be empty, and chosen and rejected "
    "of a pair must begin with the same prompt, or have it in a column prompt",
}
"""TRL's function that an error came through → its hint, where the error's own words are not in `_HINTS`."""
_HINTS |= {f"KeyError: '{name}'": _COLUMNS for name in ("prompt", "completion", "chosen", "rejected", "text", "label")}


class DryRunDone(Exception):
    """Everything was built and checked: the script is left before its first step."""


class Logbook:
    """The findings and facts of the trainings of one process, which follows `job` and writes into `folder`."""

    def __init__(self, job: TrainingJob, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {"outputs": [], "rank": int(os.environ.get("RANK", "0"))}
        self.has_failed = False

    def judge(self, findings: Iterable[Finding]) -> None:
        """Keep and print what is not ignored. Raises `TrainingStopped` at an error in mode `stop`.

        That error is not printed: the waiting command prints it last, and once.
        """
        found_here = (found for found in findings if found.code not in self.job.guard.ignore)
        kept = [replace(found, hint=as_typed(found.hint, self.job.typed)) for found in found_here]
        self.findings += kept
        stops = self.job.guard.mode == "stop"
        error = next((found for found in kept if stops and found.severity is Severity.ERROR), None)
        self._show([found for found in kept if found is not error])
        if error is not None:
            said = f"{error.code}: {error.message}"
            self.write(TrainingStatus.STOPPED, error=said, hint=error.hint)  # now: a launcher may end this process
            raise TrainingStopped(said, hint=error.hint)

    def remember_adapters(self, model: Any) -> None:
        """Note which of several adapters is trained, by which saved folders are judged."""
        for name in model.peft_config if len(model.peft_config) > 1 else ():
            parts = f".{name}.", f".{name}"
            own = (item for path, item in model.named_parameters() if parts[0] in path or path.endswith(parts[1]))
            trained = self.facts.setdefault("adapters", {})
            trained[name] = trained.get(name, False) or any(item.requires_grad for item in own)

    def write(self, status: TrainingStatus, **rest: Any) -> None:
        """Write an outcome with everything that was seen until now; `rest` are its other fields."""
        self.has_failed = self.has_failed or status in (TrainingStatus.STOPPED, TrainingStatus.FAILED)
        if self.folder.is_dir():
            outcome = TrainingOutcome(status=status, findings=tuple(self.findings), facts=self.facts, **rest)
            write_outcome(self.folder, self.facts["rank"], outcome)

    def ended_by(self, error: BaseException) -> bool:
        """Write how `error` ends this process, where a command waits for that; return whether it says all there is."""
        if isinstance(error, RuntimeError) and "probability tensor contains" in str(error):  # torch.multinomial's words
            cure = "dtype: auto or bfloat16; lora-tool validate BASE --deep looks for NaN in the base"
            what = f"no completion can be drawn, as the logits are NaN or above float16's range: {error}"
            try:
                self.judge([trap("nan-logits", cure, what=what)])
            except TrainingStopped:
                return True
        if isinstance(error, TrainingStopped | DryRunDone):
            return True
        if not isinstance(error, Exception):
            return self.job.ours
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
        known = next((hint for words, hint in _HINTS.items() if words in said), None)
        frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        hint = known or next((hint for name, hint in _FRAMES.items() if name in frames), None)
        if known and isinstance(error, KeyError):
            said = f"the data has no column or split {error}"
        self.write(TrainingStatus.FAILED, error=said, hint=as_typed(hint, self.job.typed))
        return self.job.ours and known is not None

    def _show(self, findings: Sequence[Finding]) -> None:
        """Print the findings, the same ones counted: one tensor's fault is often that of hundreds."""
        for first, *others in () if self.facts["rank"] else by_rule(findings):
            more = f" (and {len(others)} more like it)" if others else ""
            place = f"{first.path}: " if first.path else ""
            lines = [f"{first.severity}: {first.code}: {place}{first.message}{more}"]
            lines += [f"  hint: {first.hint}"] if first.hint else []
            sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))


@functools.cache
def this_process() -> Logbook:
    """Return the logbook of this process, whose job is in the folder that the environment names."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    return Logbook(read_job(folder), folder)

"""The process that trains: TRL's own script, with its trainer guarded. Started by `accelerate launch`.

The script makes the trainer, trains and saves by the name that it imports from `trl`; under that name it gets a
subclass, `GuardedTrainer`.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from msgspec.structs import replace
from torch import distributed
from transformers import AutoTokenizer, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TrainOutput

from lora_tool.errors import BadRunConfig, LoraToolError, TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.train import data_checks, lifeline, live_checks, saving
from lora_tool.train.config import trl_arguments
from lora_tool.train.guard import Guard
from lora_tool.train.job import (
    FOLDER_VARIABLE,
    TrainingJob,
    TrainingOutcome,
    TrainingStatus,
    read_job,
    write_begun,
    write_outcome,
)
from lora_tool.train.logbook import Logbook
from lora_tool.train.methods import METHODS
from lora_tool.train.traps import trap

_DATA = (
    "dataset_name: a Hub id, or a folder of .jsonl, .csv or .parquet files; for a single file "
    "datasets: [{path: json, data_files: FILE, split: train}]"
)
_FULL = "free space on the disk of output_dir, then continue with --resume auto"
_NAME = "model_name_or_path and dataset_name: a folder that is there, or a Hub id of the form owner/name"
_HINTS = {
    "find any data file": _DATA,
    "doesn't exist on the Hub": _DATA,
    "Couldn't reach": _DATA,
    "StopIteration": "choose another dataset_name: this one has no rows",
    "KeyError: 'train'": "dataset_train_split: a split that the data has",
    "KeyError: 'test'": "dataset_test_split: a split that the data has, or eval_strategy: no",
    "Could not load reward function": "reward_funcs: [my_module.my_reward], or reward_model_name_or_path",
    "No module named 'mpi4py'": "accelerate_config: FILE of `accelerate config` with DeepSpeed, which then has ranks",
    "No module named": "install it; or, for a module of reward_funcs, run this in the folder that holds it",
    "FlashAttention": "attn_implementation: sdpa, or install flash-attn",
    "`kernels`": "attn_implementation: sdpa, or pip install kernels",
    "Target modules": "lora_target_modules: all-linear",
    "incompatible with Mamba": "lora_target_modules: [in_proj, x_proj], without those named above",
    "does not work with lora_dropout": "lora_dropout: 0 (TRL's default is 0.05)",
    "dataloader does not have a length": "max_steps: N for streamed data; else a smaller per_device_train_batch_size: "
    "there is no whole batch of rows",
    "Repo id must": _NAME,
    "is not a valid model identifier": _NAME,
    "is not a valid JSON file": "model_name_or_path: the model's folder, not a file of it",
    "No space left on device": _FULL,
    "unexpected pos": f"torch could not write a whole file: {_FULL}",  # its word for a full disk
    "out of memory": "a smaller per_device_train_batch_size with more gradient_accumulation_steps, or a shorter max_length",
    "padding_free=True": "max_length: null, with texts that are short enough; or packing: true",
}
"""What errors of TRL, transformers and PEFT say → the line that helps."""


_PLAIN_NAME = re.compile(r"[\w.]+\Z")


def work() -> int:
    """Do the job in the folder that the environment names, write how it ended, and return an exit code.

    An orderly end is 0, whatever the verdict, so that launchers stay quiet; the verdict is in the outcome.
    """
    folder, rank = Path(os.environ[FOLDER_VARIABLE]), int(os.environ.get("RANK", "0"))
    write_begun(folder, rank)
    lifeline.follow(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    training = TrainingProcess(read_job(folder), main_process=rank == 0)
    try:
        outcome = training.whole()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - whatever TRL, torch or the user's reward function raise
        outcome = training.failed(error)
    write_outcome(folder, rank, outcome)
    if outcome.status in (TrainingStatus.DONE, TrainingStatus.CHECKED):
        _leave_the_others()
    return 0 if outcome.traceback is None else 1


def _leave_the_others() -> None:
    """End torch's communication with the other processes, whose work is done as well.

    Its threads would otherwise let go of their last tensors while Python ends, which aborts the process.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


class _Ended(Exception):
    """The training has ended, with this status, before the script has."""

    def __init__(self, status: TrainingStatus) -> None:
        self.status = status


class TrainingProcess:
    """One job on one process. What is seen goes into `book`, and is reported however the training ends."""

    def __init__(self, job: TrainingJob, *, main_process: bool) -> None:
        self.job = job
        self.book = Logbook(job.guard, known=job.reported, prints=main_process)
        self.guard = Guard(self.book)
        self.model: Any = None
        """TRL's arguments of the model."""

    def whole(self) -> TrainingOutcome:
        """Do the whole job. Raises `TrainingStopped` where a guard stops it, else what TRL and torch raise."""
        method = self.job.method
        arguments = trl_arguments(method, self.job.options)
        _, training, self.model, _ = arguments
        training.resume_from_checkpoint = self.job.resume
        self.guard.base = self.model.model_name_or_path
        # TRL has no script for cpo and orpo; that of dpo takes the same data and asks no more of its trainer
        scripted = METHODS["dpo"] if method.experimental else method
        trl, script = importlib.import_module("trl"), importlib.import_module(f"trl.scripts.{scripted.name}")
        name, trainer = f"{scripted.prefix}Trainer", f"{method.prefix}Trainer"
        theirs, base = getattr(trl, name), getattr(importlib.import_module(method.home), trainer)
        setattr(trl, name, type(trainer, (GuardedTrainer, base), {"process": self}))
        try:
            script.main(*arguments)
        except _Ended as end:
            return self.book.outcome(end.status)
        finally:
            setattr(trl, name, theirs)
        return self.book.outcome(TrainingStatus.DONE)

    def failed(self, error: Exception) -> TrainingOutcome:
        """Return the outcome of a training that `error` ended, with the line that helps where it is known."""
        match error:
            case TrainingStopped():
                return self.book.outcome(TrainingStatus.STOPPED, error=str(error), hint=error.hint)
            case LoraToolError():
                status = TrainingStatus.USAGE if isinstance(error, BadRunConfig) else TrainingStatus.FAILED
                return self.book.outcome(status, error=str(error), hint=error.hint)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
        hint = next((hint for words, hint in _HINTS.items() if words in said), None)
        return self.book.outcome(TrainingStatus.FAILED, error=said, hint=hint, traceback=traceback.format_exc())

    def judge(self, findings: Iterable[Finding]) -> None:
        """Report what was found before the first step. An error ends the training in mode `stop`."""
        try:
            self.book.judge(findings)
        except TrainingStopped as refusal:
            raise _Ended(TrainingStatus.REFUSED) from refusal


class GuardedTrainer(Trainer):  # type: ignore[misc] # transformers is not typed
    """What a guarded trainer does beside TRL's: the class that trains is made of both.

    It judges the data before they are prepared, itself before its first step, and what it saved.
    """

    process: TrainingProcess

    def __init__(self, *, args: Any, train_dataset: Any, peft_config: Any = None, **rest: Any) -> None:
        process, method = self.process, self.process.job.method
        if process.guard.watches:
            columns = list(train_dataset.column_names or next(iter(train_dataset), {}))
            field = getattr(args, "dataset_text_field", None)
            wrong = list(data_checks.column_findings(method, columns, text_field=field))
            process.judge(wrong or data_checks.row_findings(method, train_dataset))
        target = getattr(peft_config, "target_modules", None)
        if isinstance(target, str) and target != "all-linear" and _PLAIN_NAME.match(target):
            peft_config.target_modules = {target}  # a name, of which TRL makes a regular expression
        if method.experimental:
            quantisation = rest.pop("quantization_config", None)
            args.model_init_kwargs |= {"quantization_config": quantisation} if quantisation else {}
            # their collators are made before TRL would set a pad token
            rest["processing_class"] = self._tokenizer(args)
        given = {"args": args, "train_dataset": train_dataset, "peft_config": peft_config, **rest}
        super().__init__(**given, callbacks=[process.guard])
        process.guard.trainer = self
        self._describe(train_dataset)
        if process.guard.watches:
            process.judge(self._findings(train_dataset))
        if process.job.dry_run:
            raise _Ended(TrainingStatus.CHECKED)

    def _tokenizer(self, args: Any) -> Any:
        """Return the tokenizer with a pad token, and say which if it had none."""
        model, method = self.process.model, self.process.job.method
        base, code = str(model.model_name_or_path), args.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(base, revision=model.model_revision, trust_remote_code=code)
        if tokenizer.pad_token is None and tokenizer.eos_token is None:
            hint = "tokenizer.pad_token = …, tokenizer.save_pretrained(model folder)"
            self.process.judge([trap("no-pad-token", hint, where=base)])
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
            why = f"the tokenizer has no pad token, which {method.name} needs, so its end token is used"
            self.process.book.note(f"set pad_token: {tokenizer.pad_token} ({why})")
        return tokenizer

    def _describe(self, train: Any) -> None:
        """Note the batch size and what has LoRA."""
        book, args = self.process.book, self.args
        rows, steps, processes = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
        total = book.facts["effective_batch_size"] = rows * steps * processes
        drawn = getattr(args, "num_generations", None)
        book.note(
            f"effective batch size {total}: {rows} per device × {steps} accumulation × {processes} processes"
            + (f", {drawn} completions per prompt" if drawn else "")
        )
        if getattr(self.model, "peft_config", None):
            covered, others = live_checks.coverage(self.model)
            book.facts["lora_modules"] = covered
            missing = f"; not on {', '.join(others)} (lora_target_modules: all-linear covers them)" if others else ""
            book.note("LoRA on " + ", ".join(f"{name} ×{count}" for name, count in covered.items()) + missing)
        # under ZeRO-3 a parameter is empty and DeepSpeed knows its size
        sizes = (getattr(p, "ds_numel", None) or p.numel() for p in self.model.parameters() if p.requires_grad)
        book.facts["trained_parameters"] = sum(map(int, sizes))
        if hasattr(self.train_dataset, "__len__") and hasattr(train, "__len__"):
            book.facts["rows"] = {"given": len(train), "trained": len(self.train_dataset)}

    def _findings(self, train: Any) -> Iterator[Finding]:
        job, args = self.process.job, self.args
        yield from live_checks.process_findings(job.processes, args.world_size)
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        yield from live_checks.model_findings(self.model, self.data_collator, args, sharded=sharded)
        limit = getattr(args, "max_length", None) or getattr(self, "max_length", None)  # CPO has one of its own
        packed = bool(getattr(args, "packing", False))
        yield from data_checks.length_findings(job.method, train, self.train_dataset, limit, packed=packed)

    def train(self, **rest: Any) -> Any:
        """Put away what earlier runs left where this one will save, and train."""
        book, guard, output = self.process.book, self.process.guard, Path(self.args.output_dir)
        if self.is_world_process_zero():
            for name in saving.clear_output(output):
                book.note(f"{name} of an earlier run was moved to {output / saving.SUPERSEDED}")
        try:
            done = self._ended_before(rest.get("resume_from_checkpoint")) or super().train(**rest)
        except RuntimeError as error:
            # torch.multinomial's words for a model whose logits are NaN or infinite
            if "probability tensor contains" in str(error):
                guard.logits_not_finite(str(error))
            raise
        book.facts |= {"steps": self.state.global_step, "metrics": dict(done.metrics)}
        if guard.moved is not None:
            book.facts["moved"] = guard.moved
        return done

    def _ended_before(self, checkpoint: str | None) -> TrainOutput | None:
        """Load the checkpoint if it is of the last step of this run; return None where steps are left.

        transformers would take one step more in the middle of an epoch, and nothing would have moved. Sharded models
        are loaded where it prepares the training.
        """
        if checkpoint is None or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return None
        state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        *_, last = self.set_initial_training_values(self.args, self.get_train_dataloader())
        if not 0 < last <= state.global_step:
            return None
        self._load_from_checkpoint(checkpoint)
        self.state = state
        self.process.book.note(
            f"{checkpoint} is of step {state.global_step}, the last: there was nothing left to train"
        )
        return TrainOutput(state.global_step, 0.0, {})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002 - transformers' own
        """Save beside the output folder, judge what was saved, and move it there if it is good."""
        if _internal_call:  # a checkpoint, or a push
            super().save_model(output_dir, _internal_call)
            return
        output = Path(self.args.output_dir)
        pushes, self.args.push_to_hub = self.args.push_to_hub, False  # the script pushes when it has saved
        super().save_model(str(saving.staging(output)))
        self.args.push_to_hub = pushes
        (good,) = broadcast_object_list([self._settle(output) if self.is_world_process_zero() else True])
        if not good:
            if hasattr(self, "end"):
                self.end()
            raise _Ended(TrainingStatus.BAD_RESULT)

    def _settle(self, output: Path) -> bool:
        method, model, book = self.process.job.method, self.process.model, self.process.book
        place, base = saving.staging(output), model.model_name_or_path
        saving.clean_card(place, base)
        found = saving.judge_saved(place, method)
        good = not any(item.severity is Severity.ERROR for item in found)
        if good:
            run = {"steps": self.state.global_step, "effective_batch_size": book.facts["effective_batch_size"]}
            saved = saving.record(place, method, base=base, revision=model.model_revision, run=run)
            book.facts |= {name: saved[name] for name in ("head", "num_labels", "base")}
        settled = saving.settle(output, found)
        book.facts["output"] = str(settled)
        found = [replace(item, path=item.path.replace(str(place), str(settled), 1)) for item in found]
        if good and hasattr(self, "create_model_card"):
            self.create_model_card(model_name=output.resolve().name)  # TRL's, where saving left PEFT's blank one
        book.report(item for item in found if item.severity is not Severity.INFO)
        return good

    def create_model_card(self, *args: Any, **rest: Any) -> None:
        """Write a README without local paths, also where it is pushed while training."""
        data = rest.get("dataset_name")
        public = {**rest, "dataset_name": None} if data is not None and Path(data).exists() else rest
        super().create_model_card(*args, **public)
        if self.is_world_process_zero():
            saving.clean_card(Path(self.args.output_dir), self.process.guard.base)


if __name__ == "__main__":
    sys.exit(work())

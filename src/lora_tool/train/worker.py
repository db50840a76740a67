"""The process that trains: TRL's own script, with its trainer guarded. Started by `accelerate launch`.

The script makes the trainer, trains and saves by the name that it imports from `trl`; under that name it gets a
subclass that judges the data before they are prepared, the trainer before its first step, and what was saved.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from lora_tool.display import printable
from lora_tool.errors import BadRunConfig, LoraToolError, TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.train import data_checks, live_checks, saving
from lora_tool.train.cards import clean_card
from lora_tool.train.codes import error
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
from lora_tool.train.methods import METHODS
from lora_tool.train.options import parse

_PLAIN_NAME = re.compile(r"[\w.]+\Z")


def main() -> int:
    """Do the job in the folder that the environment names, write how it ended, and return an exit code.

    An orderly end is 0, whatever the verdict, so that launchers stay quiet; the verdict is in the outcome.
    """
    folder, rank = Path(os.environ[FOLDER_VARIABLE]), int(os.environ.get("RANK", "0"))
    write_begun(folder, rank)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    training = TrainingProcess(read_job(folder), main_process=rank == 0)
    try:
        outcome = training.whole()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - whatever TRL, torch or the user's reward function raise
        outcome = training.failed(error)
    write_outcome(folder, rank, outcome)
    return 0 if outcome.traceback is None else 1


_DATA = (
    "dataset_name: a Hub id, or a folder of .jsonl, .csv or .parquet files; for a single file "
    "datasets: [{path: json, data_files: FILE, split: train}]"
)
_NAME = "model_name_or_path and dataset_name: a folder that is there, or a Hub id of the form owner/name"
_HINTS = (
    ("find any data file", _DATA),
    ("doesn't exist on the Hub", _DATA),
    ("Couldn't reach", _DATA),
    ("StopIteration", "another dataset_name: this one has no rows"),
    ("KeyError: 'train'", "dataset_train_split: a split that the data has"),
    ("KeyError: 'test'", "dataset_test_split: a split that the data has, or eval_strategy: no"),
    ("Could not load reward function", "reward_funcs: [my_module.my_reward], or reward_model_name_or_path"),
    ("No module named", "install it; or, for a module of reward_funcs, run this in the folder that holds it"),
    ("FlashAttention", "attn_implementation: sdpa, or install flash-attn"),
    ("`kernels`", "attn_implementation: sdpa, or pip install kernels"),
    ("Target modules", "lora_target_modules: all-linear"),
    (
        "is incompatible with Mamba-based models",
        "lora_target_modules: [in_proj, x_proj, dt_proj], without those named above",
    ),
    ("does not work with lora_dropout", "lora_dropout: 0 (TRL's default is 0.05)"),
    (
        "dataloader does not have a length",
        "max_steps: N for streamed data; else a smaller per_device_train_batch_size: there is no whole batch of rows",
    ),
    ("Repo id must", _NAME),
    ("is not a valid model identifier", _NAME),
    ("is not a valid JSON file", "model_name_or_path: the model's folder, not a file of it"),
    (
        "out of memory",
        "a smaller per_device_train_batch_size with more gradient_accumulation_steps, or a shorter max_length",
    ),
    ("padding_free=True", "max_length: null, with texts that are short enough; or packing: true"),
)
"""What errors of TRL, transformers and PEFT say → the line that helps."""


class _Ended(Exception):
    """The training has ended, with this status, before the script has."""

    def __init__(self, status: TrainingStatus) -> None:
        self.status = status


class TrainingProcess:
    """One job on one process. `findings`, `notes` and `facts` grow as it goes and are reported however it ends."""

    def __init__(self, job: TrainingJob, *, main_process: bool) -> None:
        self.job = job
        self.main = main_process
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}
        self.guard: Guard | None = None
        self.trainer: Any = None

    def whole(self) -> TrainingOutcome:
        """Do the whole job. Raises `TrainingStopped` where a guard stops it, else what TRL and torch raise."""
        method = self.job.method
        arguments = parse(method, self.job.file, self.job.words)
        _, training, self.model, _ = arguments
        training.resume_from_checkpoint = self.job.resume
        self.guard = Guard(self.job.guard, method, base=self.model.model_name_or_path, reported=self.findings)
        # TRL has no script for cpo and orpo; that of dpo takes the same data and asks no more of its trainer
        scripted = method if method.has_script else METHODS["dpo"]
        trl, script = importlib.import_module("trl"), importlib.import_module(f"trl.scripts.{scripted.name}")
        theirs = getattr(trl, scripted.trainer)
        setattr(trl, scripted.trainer, _guarded(getattr(importlib.import_module(method.home), method.trainer), self))
        try:
            script.main(*arguments)
        except _Ended as end:
            return self.outcome(end.status)
        finally:
            setattr(trl, scripted.trainer, theirs)
        return self.outcome(TrainingStatus.DONE)

    def outcome(self, status: TrainingStatus, **rest: Any) -> TrainingOutcome:
        """Return the outcome with all that was seen until now."""
        seen = [*self.findings, *(self.guard.findings if self.guard else ())]
        return TrainingOutcome(status=status, findings=tuple(seen), notes=tuple(self.notes), facts=self.facts, **rest)

    def failed(self, error: Exception) -> TrainingOutcome:
        """Return the outcome of a training that `error` ended, with the line that helps where it is known."""
        if isinstance(error, LoraToolError):
            stopped = TrainingStatus.STOPPED if isinstance(error, TrainingStopped) else TrainingStatus.FAILED
            status = TrainingStatus.USAGE if isinstance(error, BadRunConfig) else stopped
            return self.outcome(status, error=str(error), hint=error.hint)
        text = " ".join(str(error).split())
        said = f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
        hint = next((hint for words, hint in _HINTS if words in said), None)
        return self.outcome(TrainingStatus.FAILED, error=said, hint=hint, traceback=traceback.format_exc())

    def judge_data(self, train: Any, args: Any) -> None:
        """Judge the rows as they were loaded, before TRL prepares them."""
        if self.job.guard.mode == "off":
            return
        columns = list(train.column_names or next(iter(train), {}))
        field = getattr(args, "dataset_text_field", None)
        found = list(data_checks.column_findings(self.job.method, columns, text_field=field))
        self._report(found or data_checks.row_findings(self.job.method, train))
        self._end_if_refused()

    def tokenizer(self, args: Any) -> Any:
        """Return the tokenizer with a pad token, and say which if it had none."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - torch is loaded by TRL's classes, not before

        base = str(self.model.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(
            base, revision=self.model.model_revision, trust_remote_code=args.trust_remote_code
        )
        if tokenizer.pad_token is None and tokenizer.eos_token is None:
            message = "the tokenizer has neither a pad token nor an end token"
            hint = "tokenizer.pad_token = …, tokenizer.save_pretrained(model folder)"
            self._report([error("no-pad-token", message, hint=hint, where=base)])
            self._end_if_refused()
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
            why = f"the tokenizer has none, and {self.job.method.name} cannot pad without; its end token is used"
            self._note(f"set pad_token: {tokenizer.pad_token} ({why})")
        return tokenizer

    def judge_trainer(self, trainer: Any, train: Any) -> None:
        """Judge the trainer that was built on the rows `train`. A dry run ends here."""
        self.trainer = trainer
        if self.guard is not None:
            self.guard.trainer = trainer
        self._report(self._trainer_findings(train))
        self._end_if_refused()
        if self.job.dry_run:
            raise _Ended(TrainingStatus.CHECKED)

    def _trainer_findings(self, train: Any) -> Iterator[Finding]:
        trainer, args, model = self.trainer, self.trainer.args, self.trainer.model
        words, self.facts["effective_batch_size"] = live_checks.batch_note(trainer)
        self._note(words)
        if getattr(model, "peft_config", None):
            covered, rest = live_checks.coverage(model)
            self.facts["lora_modules"] = covered
            missing = f"; not on {', '.join(rest)} (lora_target_modules: all-linear covers them)" if rest else ""
            self._note("LoRA on " + ", ".join(f"{name} ×{count}" for name, count in covered.items()) + missing)
        self.facts["trained_parameters"] = sum(_numel(p) for p in model.parameters() if p.requires_grad)
        if self.job.guard.mode == "off":
            return
        yield from live_checks.process_findings(self.job.processes, trainer.accelerator.num_processes)
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        yield from live_checks.model_findings(model, trainer.data_collator, args, sharded=sharded)
        prepared = trainer.train_dataset
        limit = getattr(args, "max_length", None) or getattr(trainer, "max_length", None)  # CPO has one of its own
        packed = bool(getattr(args, "packing", False))
        yield from data_checks.length_findings(self.job.method, train, prepared, limit, packed=packed)
        if hasattr(prepared, "__len__") and hasattr(train, "__len__"):
            self.facts["rows"] = {"given": len(train), "trained": len(prepared)}

    def clear(self) -> None:
        """Put away what earlier runs left where this one will save."""
        output = Path(self.trainer.args.output_dir)
        if self.main:
            saving.clear_staging(output)
            for name in saving.set_aside(output):
                self._note(f"{name} of an earlier run was moved to {output / saving.SUPERSEDED}")

    def trained(self, metrics: Any) -> None:
        """Take in how the steps ended."""
        self.facts["steps"] = self.trainer.state.global_step
        self.facts["metrics"] = dict(metrics)
        if self.guard is not None and self.guard.moved is not None:
            self.facts["moved"] = self.guard.moved

    def save(self, write: Callable[[str], None]) -> None:
        """Save with `write` beside the output folder, judge what was saved, and move it there if it is good."""
        trainer, output = self.trainer, Path(self.trainer.args.output_dir)
        place = saving.staging(output)
        pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False  # the script pushes when it has saved
        write(str(place))
        trainer.args.push_to_hub = pushes
        good = self._settle(place, output) if self.main else True
        (good,) = broadcast_object_list([good])
        if not good:
            if hasattr(trainer, "end"):
                trainer.end()
            raise _Ended(TrainingStatus.BAD_RESULT)

    def _settle(self, place: Path, output: Path) -> bool:
        trainer, method, base = self.trainer, self.job.method, self.model.model_name_or_path
        clean_card(place, base)
        found = saving.judge(place, method)
        good = not any(item.severity is Severity.ERROR for item in found)
        if good:
            run = {"steps": trainer.state.global_step, "effective_batch_size": self.facts["effective_batch_size"]}
            saved = saving.record(place, method, base=base, revision=self.model.model_revision, run=run)
            self.facts |= {name: saved[name] for name in ("head", "num_labels", "base")}
        settled = saving.settle(output, found)
        if good and hasattr(trainer, "create_model_card"):
            trainer.create_model_card(model_name=output.resolve().name)  # TRL's, where saving left PEFT's blank one
        self.facts["output"] = str(settled)
        self._report(item for item in found if item.severity is not Severity.INFO)
        return good

    def _report(self, findings: Any) -> None:
        """Keep the findings that are not ignored nor reported already, and print them at once."""
        for found in findings:
            if found.code in self.job.guard.ignore or found.code in self.job.reported:
                continue
            self.findings.append(found)
            self._print(f"{found.severity}: {found.code}: {found.path + ': ' if found.path else ''}{found.message}")
            if found.hint:
                self._print(f"  hint: {found.hint}")

    def _end_if_refused(self) -> None:
        if self.job.guard.mode == "stop" and any(found.severity is Severity.ERROR for found in self.findings):
            raise _Ended(TrainingStatus.REFUSED)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._print(text)

    def _print(self, text: str) -> None:
        if self.main:
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


def _guarded(base: Any, training: TrainingProcess) -> type:
    """Return TRL's trainer `base` with `training` watching over what a script has it do."""

    class Guarded(base):  # type: ignore[misc] # TRL is not typed
        def __init__(self, *, args: Any, train_dataset: Any, peft_config: Any = None, **rest: Any) -> None:
            training.judge_data(train_dataset, args)
            given = {"args": args, "train_dataset": train_dataset, "peft_config": _named_targets(peft_config), **rest}
            given["callbacks"] = [training.guard]
            if "quantization_config" not in inspect.signature(base.__init__).parameters:  # cpo, orpo
                quantisation = given.pop("quantization_config", None)
                args.model_init_kwargs |= {"quantization_config": quantisation} if quantisation else {}
                # their collators are made before TRL would set a pad token
                given["processing_class"] = training.tokenizer(args)
            super().__init__(**given)
            training.judge_trainer(self, train_dataset)

        def train(self, **rest: Any) -> Any:
            training.clear()
            try:
                output = super().train(**rest)
            except RuntimeError as error:
                # torch.multinomial's words for a model whose logits are NaN or infinite
                if training.guard is not None and "probability tensor contains" in str(error):
                    training.guard.logits_not_finite(str(error))
                raise
            training.trained(output.metrics)
            return output

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002 - transformers' own
            if _internal_call:  # a checkpoint, or a push
                super().save_model(output_dir, _internal_call)
            else:
                training.save(super().save_model)

        def create_model_card(self, *args: Any, **rest: Any) -> None:
            """Write a README without local paths, also where it is pushed while training."""
            public = {name: value for name, value in rest.items() if name != "dataset_name" or not _is_there(value)}
            super().create_model_card(*args, **public)
            if self.is_world_process_zero():
                clean_card(Path(self.args.output_dir), training.model.model_name_or_path)

    Guarded.__name__ = Guarded.__qualname__ = base.__name__
    return Guarded


def _is_there(name: str | None) -> bool:
    return name is not None and Path(name).exists()


def _named_targets(config: Any) -> Any:
    """Return the adapter's config; one plain module name stays a name, where TRL makes it a regular expression."""
    target = None if config is None else config.target_modules
    if isinstance(target, str) and target != "all-linear" and _PLAIN_NAME.match(target):
        config.target_modules = {target}
    return config


def _numel(parameter: Any) -> int:
    """Return a parameter's size; under ZeRO-3 it is empty and DeepSpeed knows the whole."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


if __name__ == "__main__":
    sys.exit(main())

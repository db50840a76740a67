"""The process that trains: parses, checks, builds TRL's trainer, trains, saves, judges. Started by `accelerate launch`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from lora_tool.display import printable
from lora_tool.errors import BadRunConfig, LoraToolError, TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.train import building, data_checks, live_checks, saving
from lora_tool.train.cards import clean_card
from lora_tool.train.codes import finding
from lora_tool.train.guard import Guard
from lora_tool.train.job import (
    FOLDER_VARIABLE,
    TRACEBACK,
    Job,
    Outcome,
    Status,
    read_job,
    write_begun,
    write_outcome,
)


def main() -> int:
    """Do the job in the folder that the environment names, write how it ended, and return an exit code.

    An orderly end is 0, whatever the verdict, so that launchers stay quiet; the verdict is in the outcome.
    """
    folder, rank = Path(os.environ[FOLDER_VARIABLE]), int(os.environ.get("RANK", "0"))
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    write_begun(folder, rank)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    run = Run(read_job(folder), main_process=rank == 0)
    try:
        outcome = run.whole()
    except KeyboardInterrupt:
        return 130
    except TrainingStopped as stop:
        outcome = run.outcome(Status.STOPPED, error=str(stop), hint=stop.hint)
    except BadRunConfig as error:
        outcome = run.outcome(Status.USAGE, error=str(error), hint=error.hint)
    except LoraToolError as error:
        outcome = run.outcome(Status.FAILED, error=str(error), hint=error.hint)
    except Exception as error:  # noqa: BLE001 - whatever TRL, torch or the user's reward function raise
        (folder / TRACEBACK.format(rank=rank)).write_text(traceback.format_exc(), encoding="utf-8")
        write_outcome(folder, rank, run.outcome(Status.FAILED, error=_said(error), hint=_hint(error)))
        return 1
    write_outcome(folder, rank, outcome)
    return 0


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


_HINTS = (
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
    ("Repo id must be in the form", "a folder that is there, or a Hub id of the form owner/name"),
    (
        "out of memory",
        "a smaller per_device_train_batch_size with more gradient_accumulation_steps, or a shorter max_length",
    ),
    ("padding_free=True", "max_length: null, with texts that are short enough; or packing: true"),
)
"""What errors of TRL, transformers and PEFT say → the line that helps."""


def _hint(error: Exception) -> str | None:
    return next((hint for words, hint in _HINTS if words in str(error)), None)


class Run:
    """One job on one process. `findings`, `notes` and `facts` grow as it goes and are reported however it ends."""

    def __init__(self, job: Job, *, main_process: bool) -> None:
        self.job = job
        self.main = main_process
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}
        self.guard: Guard | None = None
        self.trainer: Any = None

    def outcome(self, status: Status, **rest: Any) -> Outcome:
        """Return the outcome with all that was seen until now."""
        seen = [*self.findings, *(self.guard.findings if self.guard else ())]
        return Outcome(status=status, findings=tuple(seen), notes=tuple(self.notes), facts=self.facts, **rest)

    def whole(self) -> Outcome:
        """Do the whole job. Raises `TrainingStopped` where a guard stops it."""
        job = self.job
        arguments = building.parse(job.method, job.options, job.arguments)
        train = self._data(arguments)
        if self._refused():
            return self.outcome(Status.REFUSED)
        self.trainer = self._build(arguments, train)
        self._report(self._check_trainer(train))
        if self._refused():
            return self.outcome(Status.REFUSED)
        if job.dry_run:
            return self.outcome(Status.CHECKED)
        return self._train()

    def _data(self, arguments: building.Arguments) -> Any:
        data = building.load_data(arguments)
        train = building.split(data, arguments.script.dataset_train_split, "dataset_train_split")
        self.evaluation = (
            building.split(data, arguments.script.dataset_test_split, "dataset_test_split")
            if str(getattr(arguments.training.eval_strategy, "value", arguments.training.eval_strategy)) != "no"
            else None
        )
        if self.job.guard.mode == "off":
            return train
        columns = list(train.column_names or next(iter(train), {}))
        field = getattr(arguments.training, "dataset_text_field", None)
        found = list(data_checks.column_findings(self.job.method, columns, text_field=field))
        self._report(found or data_checks.row_findings(self.job.method, train))
        return train

    def _build(self, arguments: building.Arguments, train: Any) -> Any:
        base = arguments.model.model_name_or_path
        self.guard = Guard(self.job.guard, self.job.method, base=base, told=self.findings)
        trainer = building.build(
            self.job.method,
            arguments,
            train=train,
            evaluation=self.evaluation,
            tokenizer=self._tokenizer(arguments) if self.job.method.needs_tokenizer else None,
            callbacks=[self.guard],
        )
        self.guard.trainer = trainer
        self.arguments = arguments
        _keep_paths_out(trainer, base)
        return trainer

    def _tokenizer(self, arguments: building.Arguments) -> Any:
        """Return the tokenizer with a pad token, and say which if it had none."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - torch is loaded by TRL's classes, not before

        tokenizer = AutoTokenizer.from_pretrained(
            arguments.model.model_name_or_path,
            revision=arguments.model.model_revision,
            trust_remote_code=arguments.training.trust_remote_code,
        )
        given = getattr(arguments.training, "pad_token", None)
        if given:
            tokenizer.pad_token = given
        elif tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                self._report(
                    [
                        finding(
                            "no-pad-token",
                            Severity.ERROR,
                            "the tokenizer has neither a pad token nor an end token",
                            hint="tokenizer.pad_token = …, tokenizer.save_pretrained(model folder)",
                            where=str(arguments.model.model_name_or_path),
                        )
                    ]
                )
                raise TrainingStopped("no-pad-token: nothing to pad with", hint="give the tokenizer a pad token")
            tokenizer.pad_token = tokenizer.eos_token
            self._note(
                f"set pad_token: {tokenizer.pad_token} (the tokenizer has none, and {self.job.method.name} cannot pad without; its end token is used)"
            )
        return tokenizer

    def _check_trainer(self, train: Any) -> list[Finding]:
        trainer, args, method = self.trainer, self.trainer.args, self.job.method
        words, self.facts["effective_batch_size"] = live_checks.batch_note(trainer)
        self._note(words)
        model = trainer.model
        if getattr(model, "peft_config", None):
            covered, rest = live_checks.coverage(model), live_checks.uncovered(model)
            self.facts["lora_modules"] = covered
            self._note(
                "LoRA on "
                + ", ".join(f"{name} ×{count}" for name, count in covered.items())
                + (f"; not on {', '.join(rest)} (lora_target_modules: all-linear covers them)" if rest else "")
            )
        trained = sum(_numel(p) for p in model.parameters() if p.requires_grad)
        self.facts["trained_parameters"] = trained
        if self.job.guard.mode == "off":
            return []
        asked = (
            (args.model_init_kwargs or {}).get("attn_implementation") if hasattr(args, "model_init_kwargs") else None
        )
        found = list(live_checks.process_findings(self.job.processes, trainer.accelerator.num_processes))
        found += live_checks.model_findings(model, asked)
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        found += live_checks.packing_findings(model, trainer.data_collator, args, sharded=sharded)
        prepared = trainer.train_dataset
        packed = bool(getattr(args, "packing", False))
        limit = getattr(args, "max_length", None) or getattr(trainer, "max_length", None)  # CPO has one of its own
        found += data_checks.length_findings(method, train, prepared, limit, packed=packed)
        if hasattr(prepared, "__len__") and hasattr(train, "__len__"):
            self.facts["rows"] = {"given": len(train), "trained": len(prepared)}
        return found

    def _report(self, findings: Any) -> None:
        """Keep the findings that are not ignored nor told already, and say them at once."""
        for found in findings:
            if found.code in self.job.guard.ignore or found.code in self.job.told:
                continue
            self.findings.append(found)
            self._say(f"{found.severity}: {found.code}: {found.path + ': ' if found.path else ''}{found.message}")
            if found.hint:
                self._say(f"  hint: {found.hint}")

    def _refused(self) -> bool:
        errors = any(found.severity is Severity.ERROR for found in self.findings)
        return errors and self.job.guard.mode == "stop"

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    def _say(self, text: str) -> None:
        if self.main:
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()

    def _train(self) -> Outcome:
        trainer = self.trainer
        output = Path(trainer.args.output_dir)
        if self.main:
            saving.clear_staging(output)
            for name in saving.set_aside(output):
                self._note(f"{name} of an earlier run was moved to {output / saving.SUPERSEDED}")
        try:
            trained = trainer.train(resume_from_checkpoint=self.job.resume)
        except RuntimeError as error:
            # torch.multinomial's words for a model whose logits are NaN or infinite
            if self.guard is not None and "probability tensor contains" in str(error):
                self.guard.logits_not_finite(str(error))
            raise
        self.facts["steps"] = trainer.state.global_step
        self.facts["metrics"] = dict(trained.metrics)
        if self.guard is not None and self.guard.moved is not None:
            self.facts["moved"] = self.guard.moved
        return self._save(output)

    def _save(self, output: Path) -> Outcome:
        trainer, method = self.trainer, self.job.method
        place = saving.staging(output)
        pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False
        trainer.save_model(str(place))
        trainer.args.push_to_hub = pushes
        status = Status.DONE
        if self.main:
            base = self.arguments.model.model_name_or_path
            clean_card(place, base)
            found = saving.judge(place, method)
            run = {"steps": trainer.state.global_step, "effective_batch_size": self.facts["effective_batch_size"]}
            if not any(item.severity is Severity.ERROR for item in found):
                saved = saving.record(place, method, base=base, revision=self.arguments.model.model_revision, run=run)
                self.facts |= {name: saved[name] for name in ("head", "num_labels", "base")}
            settled = saving.settle(output, found)
            if settled == output and hasattr(trainer, "create_model_card"):
                trainer.create_model_card(model_name=output.resolve().name)  # TRL's, where saving left PEFT's blank one
            self.facts["output"] = str(settled)
            self._report(item for item in found if item.severity is not Severity.INFO)
            if settled != output:
                status = Status.BAD_RESULT
        (status,) = broadcast_object_list([status])  # all ranks save again when they push
        if pushes and status is Status.DONE:
            trainer.push_to_hub(dataset_name=self._public_dataset())
        if hasattr(trainer, "end"):
            trainer.end()
        return self.outcome(status)

    def _public_dataset(self) -> str | None:
        """Return the data's name for the README; not that of a folder of this machine."""
        name: str | None = self.arguments.script.dataset_name
        return None if name is None or Path(name).exists() else name


def _numel(parameter: Any) -> int:
    """Return a parameter's size; under ZeRO-3 it is empty and DeepSpeed knows the whole."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _keep_paths_out(trainer: Any, base: str) -> None:
    """Let every README that this trainer writes, also those it pushes while training, be cleaned of local paths."""
    write = getattr(trainer, "create_model_card", None)
    if write is None:
        return

    def create_model_card(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        if trainer.is_world_process_zero():
            clean_card(Path(trainer.args.output_dir), base)

    trainer.create_model_card = create_model_card


if __name__ == "__main__":
    sys.exit(main())

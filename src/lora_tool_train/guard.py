"""The guard: a callback of the HF Trainer that watches gradients and logs, and raises when a run is doomed.

It raises because `should_training_stop` would let the script go on to say "completed" and save what it has. All ranks
see the same gathered figures and the same reduced gradients, so all leave together; sharded gradients, of which each
rank sees a part, are judged by the logged norm alone.
"""

from __future__ import annotations

import atexit
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import extract_model_from_parallel
from msgspec.structs import replace
from transformers import TrainerCallback

from lora_tool.core.report import Finding, Severity
from lora_tool_train import live_checks
from lora_tool_train.diagnosis import SignalTracker
from lora_tool_train.job import TrainingStatus
from lora_tool_train.logbook import DryRunDone, this_process
from lora_tool_train.methods import METHODS, Method
from lora_tool_train.results import clear_output, lost_in
from lora_tool_train.resuming import resume_findings
from lora_tool_train.rows import label_findings, one_row, read_rows
from lora_tool_train.traps import trap

_SCALER_PATIENCE = 20
"""Steps in a row that a GradScaler may skip: it starts at 65536 and halves, so 16 skips can be its way down."""

_SNAPSHOT = 1 << 26
"""Elements of trained parameters whose start is kept to be compared with the end: an adapter's, not a model's."""


def attach(trainer: Any) -> None:
    """Let each Trainer of this process have a guard; `trainer` is the module `transformers.trainer`."""
    trainer.DEFAULT_CALLBACKS.append(Guard)
    atexit.register(write_done)


def write_done() -> None:
    """Write the outcome of this process, where nothing has stopped it."""
    book = this_process()
    if book.facts["outputs"] and not book.has_failed:
        book.write(TrainingStatus.CHECKED if book.job.dry_run else TrainingStatus.DONE)


def method_of(args: Any) -> Method | None:
    """Return the method whose config of TRL the arguments are, None for a Trainer that is not TRL's."""
    classes = {base.__name__ for base in type(args).__mro__}
    return next((method for method in METHODS.values() if f"{method.prefix}Config" in classes), None)


class Guard(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Watches one training; transformers makes it with the Trainer. Raises `TrainingStopped` in mode `stop`."""

    def __init__(self) -> None:
        self.book = this_process()
        self.watches = self.book.job.guard.mode != "off"
        self.tracker = SignalTracker(window=self.book.job.guard.window)
        self.start: dict[str, torch.Tensor] = {}
        self.gradient: float | None = None
        self.args: Any = None
        self.state: Any = None
        self.model: Any = None
        self._skipped = 0
        self._has_saved = False

    def on_init_end(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Judge the checkpoint that `train` resumes from, before the Trainer loads what fits of it."""
        wanted = getattr(args, "resume_from_checkpoint", None)
        if self.watches and isinstance(wanted, str) and Path(wanted).is_dir() and hasattr(model, "peft_config"):
            self.book.judge(resume_findings(model, Path(wanted)))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:  # noqa: ARG002
        self.args, self.state, self.model = args, state, model
        self.book.facts["outputs"] = sorted({*self.book.facts["outputs"], str(Path(args.output_dir).resolve())})
        self.tracker.method = method_of(args)
        self.tracker.mask_truncated = bool(getattr(args, "mask_truncated_completions", False))
        self.tracker.batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._sharded = _is_sharded(args)
        if self.watches and model is not None:
            if self._sharded and not args.max_grad_norm:
                args.logging_nan_inf_filter = False  # there is no gradient to see, and it shows a NaN loss as 0.0
            self._judge(args, state, extract_model_from_parallel(model), rest)
        if self.book.job.dry_run:
            raise DryRunDone
        if self.book.job.ours and state.is_world_process_zero:
            clear_output(Path(args.output_dir))
        # transformers takes a step of nothing where a checkpoint of the last step is resumed from
        if model is not None and not self._sharded and state.global_step < state.max_steps:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if sum(p.numel() for p in trained.values()) <= _SNAPSHOT:
                self.start = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}

    def _judge(self, args: Any, state: Any, model: Any, rest: Mapping[str, Any]) -> None:
        if hasattr(model, "peft_config"):
            self.book.remember_adapters(model)
            if state.global_step and not args.resume_from_checkpoint:  # which was judged before it was loaded
                self.book.judge(resume_findings(model, Path(args.output_dir) / f"checkpoint-{state.global_step}"))
        loader: Any = rest.get("train_dataloader")
        words = rest.get("processing_class") or getattr(loader, "collate_fn", None)
        words = getattr(words, "tokenizer", words)
        rows = read_rows(loader)
        if self.book.job.dry_run and words is not None:
            self.book.facts["row"] = one_row(loader, rows, words)
        self.tracker.unlabelled = bool(rows) and not any(row.has_labels for row in rows)
        self.tracker.remember(state.log_history, state.global_step)
        self.book.judge(self._checks(args, state, model, rest))
        self.book.judge(label_findings(rows, words, are_all=bool(rows) and len(rows) == len(loader.dataset)))

    def _checks(self, args: Any, state: Any, model: Any, rest: Mapping[str, Any]) -> Iterator[Finding]:
        loader = rest.get("train_dataloader")
        yield from live_checks.model_findings(model, getattr(loader, "collate_fn", None), args, sharded=self._sharded)
        method, data = self.tracker.method, getattr(loader, "dataset", None)
        if method is not None and hasattr(data, "select") and hasattr(data, "column_names"):
            yield from live_checks.row_findings(method, data)
        yield from live_checks.rate_findings(model, rest.get("lr_scheduler"), state.max_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        if self._sharded or model is None or not self.watches:
            return
        norm = _norm([p.grad for p in model.parameters() if p.requires_grad and p.grad is not None])
        if math.isfinite(norm):
            self.gradient = max(self.gradient or 0.0, norm)
            self._skipped = 0
            return
        self._skipped += 1
        if self._skipped > (_SCALER_PATIENCE if _has_scaler(args) else 0):
            what = f"the gradient is {norm} in step {state.global_step + 1}, before it reached the weights"
            self._stop(trap("nan-gradients", None, what=what))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step >= state.max_steps and not self.tracker.has_seen and self.watches:
            control.should_log = True  # a run shorter than logging_steps would end without a figure to judge it by

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        if logs and self.watches and not (_has_scaler(args) and 0 < self._skipped <= _SCALER_PATIENCE):
            found = self.tracker.observe(state.global_step, logs, self.gradient)
            self.gradient = None
            if found is not None:
                self._stop(found)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self._has_saved or not (self.watches and state.is_world_process_zero and hasattr(self.model, "peft_config")):
            return
        self._has_saved = True  # what the first checkpoint lacks, the last one would lack after a week
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        lost = lost_in(saved)
        if lost is not None:
            hint = lost.hint or f"lora-tool validate {shlex.quote(str(saved))}"
            self._stop(trap("not-saved", hint, where=saved.name, why=lost.message))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        self.book.facts["steps"] = state.global_step
        if not self.watches:
            return
        verdict, last, since = self.tracker.verdict(), self.tracker.last, self.tracker.lost()
        if verdict is not None:
            self._stop(verdict)
        if since is not None and last is not None:
            self.book.judge([trap("signal-lost", last.hint, where="training", since=since, why=last.message)])
        if model is not None and self.start:
            self.book.facts["moved"] = self._movement(model)
            if not self.book.facts["moved"]:
                hint = "set a learning_rate above 0, and more steps than warmup_steps"
                self._stop(trap("never-moved", hint, count=len(self.start), steps=state.global_step))

    def _movement(self, model: Any) -> float:
        pairs = ((p, self.start.get(name)) for name, p in model.named_parameters())
        changes = (
            p.detach().cpu().float() - old.float() for p, old in pairs if old is not None and old.shape == p.shape
        )
        return math.sqrt(sum(float(change.square().sum()) for change in changes))

    def _stop(self, found: Finding) -> None:
        """Report, once, why the run is doomed. A figure that is not finite is explained by the dtypes."""
        if found.code in self.tracker.reported or found.code in self.book.job.guard.ignore:
            return
        self.tracker.reported.add(found.code)
        if found.hint is None:
            why, cure = not_finite(self.args, self.model)
            found = replace(found, message=f"{found.message}; {why}", hint=cure)
        severity = Severity.ERROR if self.book.job.guard.mode == "stop" else Severity.WARNING
        self.book.judge([replace(found, severity=severity, path=f"step {self.state.global_step}")])


def _norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of all gradients together, as torch's clip_grad_norm_ computes it: waiting for the device once."""
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - what clip_grad_norm_ uses
    return float(torch.linalg.vector_norm(torch.stack([norm.float().to(norms[0].device) for norm in norms])))


def _is_sharded(args: Any) -> bool:
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        return True
    begun = bool(AcceleratorState._shared_state)  # noqa: SLF001 - asking for it would make one
    return begun and AcceleratorState().distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def _has_scaler(args: Any) -> bool:
    """Whether losses are scaled, so that single steps with infinite gradients are skipped and harmless."""
    return bool(args.fp16) and torch.cuda.is_available() and not args.use_cpu


def not_finite(args: Any, model: Any) -> tuple[str, str]:
    """Return why a figure is NaN or infinite, and the cure."""
    rate = args.learning_rate
    why = f"the learning rate ({rate:g}) may be too high, or the data or the weights hold NaN."
    cure = f"learning_rate: {rate / 10:g}, max_grad_norm: 1.0; lora-tool validate BASE --deep looks for NaN in the base"
    if args.fp16:
        why = "fp16 is on, and an activation above 65504 overflows."
        cure = "bf16: true instead of fp16; keep max_grad_norm: 1.0"
    if model is not None and any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        why = "the weights are float16, and an activation above 65504 overflows."
        cure = "dtype: auto or bfloat16 (float32 with fp16: true scales the loss); keep max_grad_norm: 1.0"
    return why, cure

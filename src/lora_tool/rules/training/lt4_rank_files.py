"""LT401 to LT410, LT416: the files of checkpoints in pieces, judged by names, shapes and counters.

No weight is read. `lora-tool consolidate` refuses on the same findings.
"""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.training.sharded_subject import ShardedSubject


@rule("LT401", Severity.ERROR, on=ShardedSubject)
def rank_file_missing(subject: ShardedSubject) -> Iterator[Fault]:
    """Rank files are missing.

    What it does: Compares the rank files with the world size that they state, and the `.distcp` files with those that
    `.metadata` names. A file with one rank's slices under the name of the whole model also counts. Under HSDP, where
    other ranks hold the same values, a missing file is a warning.

    Why it matters: Under ZeRO and FSDP each process holds a part of every weight, so without one file no weight is
    complete.

    Example: The optimizer files of ranks 2 and 3 of 4 are missing, because only the first of two machines was copied.

    What to do: Copy them from the other machines of the run: every node writes the files of its own ranks.
    """
    yield from subject.structure("LT401")


@rule("LT402", Severity.ERROR, on=ShardedSubject)
def rank_file_unreadable(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file that cannot be read.

    What it does: Reads the directory and the structure of every rank file, without running any code in it.

    Why it matters: If a file is truncated, empty or of another format, the weights of its rank are gone.

    Example: `zero_pp_rank_1_mp_rank_00_model_states.pt` is 0 bytes because the disk was full.

    What to do: Copy it again from where it was written, or use another save: `lora-tool consolidate CKPT --tag T`, or
    another `checkpoint-N`.
    """
    yield from subject.structure("LT402")


@rule("LT403", Severity.ERROR, on=ShardedSubject)
def world_size(subject: ShardedSubject) -> Iterator[Fault]:
    """Rank files that disagree about the world size.

    What it does: Compares the world size that each file states, and looks for files of ranks beyond it.

    Why it matters: Parts written by 4 processes do not fit together with parts written by 8.

    Example: A run was resumed on 8 GPUs into the folder of a run on 4, with the same tag.

    What to do: Tell the two saves apart by the modification times of their files, and keep the files of one.
    """
    yield from subject.structure("LT403")


@rule("LT404", Severity.ERROR, on=ShardedSubject)
def rank_file_moved(subject: ShardedSubject) -> Iterator[Fault]:
    """A renamed rank file.

    What it does: Compares the name of each file with the name of the folder inside it, which torch gives it on saving.

    Why it matters: If the files of two ranks are swapped, all weights are wrong, and zero_to_fp32 accepts them.

    Example: `…rank_0…` was written as `…rank_1…`.

    What to do: Rename the file back, or copy the files again.
    """
    yield from subject.structure("LT404")


@rule("LT405", Severity.ERROR, on=ShardedSubject)
def rank_file_copied(subject: ShardedSubject) -> Iterator[Fault]:
    """Files of two ranks with the same content.

    What it does: Compares the checksums that the files store.

    Why it matters: One rank's part replaces another's, so a part of each weight is wrong.

    Example: A download script saved the first rank's file under two names.

    What to do: Copy the right file again.
    """
    yield from subject.structure("LT405")


@rule("LT406", Severity.ERROR, on=ShardedSubject)
def other_step(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file from another step.

    What it does: Compares the step counters of all rank files.

    Why it matters: Weights assembled from two steps were never trained; zero_to_fp32 silently assembles them.

    Example: Saving was interrupted: two ranks hold step 200, the other two still step 100.

    What to do: Use another save: `lora-tool consolidate CKPT --tag T`, or another `checkpoint-N`.
    """
    yield from subject.structure("LT406")


@rule("LT407", Severity.ERROR, on=ShardedSubject)
def other_run(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file from another run.

    What it does: Compares the DeepSpeed config and the parameters that each rank file lists, and under HSDP the values
    of ranks that should hold the same.

    Why it matters: Parts of two models of the same shape fit together but make nonsense.

    Example: Somebody mixed the files of two runs while collecting them from several machines.

    What to do: Copy the files again, all from one run.
    """
    yield from subject.structure("LT407")


@rule("LT408", Severity.ERROR, on=ShardedSubject)
def other_number_of_elements(subject: ShardedSubject) -> Iterator[Fault]:
    """Partitions with a wrong number of elements.

    What it does: Adds up the elements of every parameter group and compares them with its shapes, allowing for padding.
    It checks every rank's piece of a frozen parameter in the same way, and in an FSDP checkpoint the rows of every
    tensor.

    Why it matters: If they differ, every parameter after the difference is read from the wrong place.

    Example: A group of 3 parameters needs 1,024 elements, but its partitions hold 1,536.

    What to do: Use another save of the run. If DeepSpeed resumes from the checkpoint without an error, please report it
    as a bug.
    """
    yield from subject.structure("LT408")


@rule("LT409", Severity.WARNING, on=ShardedSubject)
def older_than_newest(subject: ShardedSubject) -> Iterator[Fault]:
    """`latest` does not name the newest tag.

    What it does: Compares the tag in the file `latest` with the existing tags. A tag that does not exist is an error.

    Why it matters: Tools use the tag that `latest` names, so you would get older weights than you expect.

    Example: `latest` says global_step100 although global_step200 exists, because the run died between the two writes.

    What to do: Use the newer tag if it is complete: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.structure("LT409")


@rule("LT410", Severity.INFO, on=ShardedSubject)
def frozen_weights_absent(subject: ShardedSubject) -> Iterator[Fault]:
    """Frozen weights that are not in the checkpoint.

    What it does: Compares the parameters of the training module with those whose values were saved.

    Why it matters: With LoRA the frozen base exists elsewhere. But a new score head under LoRA is frozen, too, and its
    random values exist only here: if they are not saved, the rewards are lost.

    Example: The HF Trainer saves PEFT models with `exclude_frozen_parameters=True`.

    What to do: Put a new head into `modules_to_save`, so that PEFT trains and saves it.
    """
    yield from subject.structure("LT410")


@rule("LT416", Severity.ERROR, on=ShardedSubject)
def without_adapter(subject: ShardedSubject) -> Iterator[Fault]:
    """A checkpoint without its adapter.

    What it does: Looks for LoRA among the tensors of a PEFT model, and for any tensor at all.

    Why it matters: The checkpoint lacks the trained weights, and resuming from it starts with a new adapter. PEFT 0.21
    under FSDP1 does not recognise the adapter's tensors: saving succeeds, but the folder holds nothing, or only the
    head.

    Example: `pytorch_model_fsdp_0` of a LoRA run holds only `base_model.model.score.weight`.

    What to do: Stop the run. Train with FSDP2 (`fsdp_version: 2`), or with PEFT 0.20.
    """
    yield from subject.structure("LT416")

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

    What it does: Compares the rank files that are there with the number of processes that the others count, and the
    `.distcp` files with those that `.metadata` names. A file of one rank's slices under the name of the whole is one,
    too; under HSDP, where other ranks hold the same, a missing file is a warning.

    Why it matters: Under ZeRO and FSDP each process holds a part of every weight. Without one no weight is whole.

    Example: Of 4 ranks the optimizer files of ranks 2 and 3 are missing: only the first of two machines was copied.

    What to do: Copy them from the other machines of the run: every node writes its own ranks' files.
    """
    yield from subject.structure("LT401")


@rule("LT402", Severity.ERROR, on=ShardedSubject)
def rank_file_unreadable(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file that cannot be read.

    What it does: Reads the directory and the structure of every rank file, without running anything in it.

    Why it matters: A file that is cut off, empty or of another format means that the weights of its rank are gone.

    Example: `zero_pp_rank_1_mp_rank_00_model_states.pt` is 0 bytes because the disk was full.

    What to do: Copy it again from where it was written, or use another tag: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.structure("LT402")


@rule("LT403", Severity.ERROR, on=ShardedSubject)
def world_size(subject: ShardedSubject) -> Iterator[Fault]:
    """Rank files that count the processes differently.

    What it does: Compares the world size that each file states, and looks for files of ranks beyond it.

    Why it matters: Parts cut for 4 processes do not fit together with parts cut for 8.

    Example: A run was resumed on 8 GPUs into the folder of a run on 4, with the same tag.

    What to do: Separate the two saves by their times, and keep the files of one.
    """
    yield from subject.structure("LT403")


@rule("LT404", Severity.ERROR, on=ShardedSubject)
def rank_file_moved(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file that was written under another name.

    What it does: torch names the folder inside a file after the file; the two names are compared.

    Why it matters: Two ranks' files that are swapped give weights that are all wrong, and zero_to_fp32 accepts them.

    Example: `…rank_0…` holds what was written as `…rank_1…`.

    What to do: Give the file its name back, or copy the files again.
    """
    yield from subject.structure("LT404")


@rule("LT405", Severity.ERROR, on=ShardedSubject)
def rank_file_copied(subject: ShardedSubject) -> Iterator[Fault]:
    """Two ranks' files with the same content.

    What it does: Compares the checksums that the files keep of their contents.

    Why it matters: One rank's part stands in for another's: half of each weight is the wrong half.

    Example: A script that downloads the ranks wrote the first one twice.

    What to do: Copy the right file again.
    """
    yield from subject.structure("LT405")


@rule("LT406", Severity.ERROR, on=ShardedSubject)
def other_step(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file of another step.

    What it does: Compares the step counters of all rank files.

    Why it matters: Weights put together from two steps were never trained; zero_to_fp32 does so without a word.

    Example: Saving was interrupted: two ranks had written step 200, two still hold step 100.

    What to do: Use another tag: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.structure("LT406")


@rule("LT407", Severity.ERROR, on=ShardedSubject)
def other_run(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file of another run.

    What it does: Compares the DeepSpeed config and the parameters that each rank file lists, and the values of ranks that
    hold the same under HSDP.

    Why it matters: Parts of two models of the same shape fit together and make nonsense.

    Example: The files of two runs were mixed while collecting them from several machines.

    What to do: Copy the files again, all from one run.
    """
    yield from subject.structure("LT407")


@rule("LT408", Severity.ERROR, on=ShardedSubject)
def other_number_of_elements(subject: ShardedSubject) -> Iterator[Fault]:
    """Partitions with too many or too few elements.

    What it does: Adds up the elements of every parameter group and compares them with its shapes, padding taken into
    account; so too every rank's piece of a frozen parameter, and in an FSDP checkpoint the rows of every tensor.

    Why it matters: Where they differ, every parameter behind the difference is read from the wrong place.

    Example: A group of 3 parameters needs 1,024 elements, and its partitions hold 1,536.

    What to do: Use another tag; tell us, if the checkpoint resumes well in DeepSpeed.
    """
    yield from subject.structure("LT408")


@rule("LT409", Severity.WARNING, on=ShardedSubject)
def older_than_newest(subject: ShardedSubject) -> Iterator[Fault]:
    """`latest` does not name the newest tag.

    What it does: Compares the tag in the file `latest` with those that are there. One that is not there is an error.

    Why it matters: Tools take the tag that `latest` names: the weights would be older than you think.

    Example: `latest` says global_step100, and global_step200 is there, because the run died between the two writes.

    What to do: Take the newer one, if it is whole: `lora-tool consolidate CKPT --tag T`.
    """
    yield from subject.structure("LT409")


@rule("LT410", Severity.INFO, on=ShardedSubject)
def frozen_weights_absent(subject: ShardedSubject) -> Iterator[Fault]:
    """Frozen weights that are not in the checkpoint.

    What it does: Compares the parameters of the training module with those whose values were saved.

    Why it matters: With LoRA the base is frozen, and is elsewhere. But a new score head under LoRA is frozen too,
    random, and nowhere else: then the rewards are lost.

    Example: The HF Trainer saves PEFT models with `exclude_frozen_parameters=True`.

    What to do: Put a new head into `modules_to_save`, so that it is trained and saved.
    """
    yield from subject.structure("LT410")


@rule("LT416", Severity.ERROR, on=ShardedSubject)
def without_adapter(subject: ShardedSubject) -> Iterator[Fault]:
    """A checkpoint without the adapter.

    What it does: Looks for LoRA among the tensors of a PEFT model, and for any tensor at all.

    Why it matters: What was trained is not in it, and resuming from it begins with a new adapter. PEFT 0.21 under FSDP1
    takes none of the adapter's tensors for the adapter's: the save ends well, and the folder holds nothing, or the
    head.

    Example: `pytorch_model_fsdp_0` of a LoRA run holds `base_model.model.score.weight` and nothing else.

    What to do: Stop the run. Train with FSDP2 (`fsdp_version: 2`), or with PEFT 0.20.
    """
    yield from subject.structure("LT416")

"""`lora-tool convert`: an adapter in the form that another program reads, a judge as a classifier."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.options import ChoiceOf, FolderOrId, Timed, options_of, typed_as
from lora_tool.cli.writing import caller, run_options
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.workflows.convert import ConvertOptions, convert


@click.command(
    "convert", cls=Timed, epilog="Example: lora-tool convert run/broadcasts/step_100 --to peft -o my-adapter/"
)
@click.argument("folder", type=FolderOrId(), metavar="[FOLDER]", default=".")
@click.option(
    "--to",
    type=ChoiceOf(AdapterForm),
    required=True,
    help="peft: the names that PEFT loads; mlx: MLX-LM's format; peft-experts, peft-fused: LoRA on experts one by one, "
    "or fused as transformers 5 has them; seq-cls: a classifier made of a judge or of another classifier.",
)
@options_of(ConvertOptions)
@run_options
def command(folder: str, to: AdapterForm, **typed: Any) -> None:
    """Write the adapter in FOLDER (by default this one) in the format that another program reads, every value as it is.

    --to peft repairs tensor names that prime-rl, torch.compile, FSDP1 or DistributedDataParallel wrote, that contain an
    adapter's name, or that lost their prefix. An ambiguous name is refused. With --rm, the value head that
    LLaMA-Factory saved beside the adapter of a causal LM becomes the score head of a sequence classifier.
    --to peft also turns an adapter of MLX-LM into a PEFT adapter; --to mlx writes MLX-LM's format, for adapters with one
    rank and one scaling.

    --to peft-fused writes LoRA on single experts (transformers 4, vLLM) as PEFT's `target_parameters` of transformers 5,
    and --to peft-experts converts back, with the names of the experts in the base.

    --to seq-cls writes a judge, a model or an adapter that answers with one token, as a reward model: --yes yes --no no
    gives the difference of the two logits as the score, --label safe=safe --label unsafe=unsafe a row for each answer. Of
    a classifier, --label chooses labels, and --yes LABEL_1 --no LABEL_0 makes one score of two. --scale multiplies it.
    """
    convert(folder, to, typed_as(ConvertOptions, typed), caller(typed))

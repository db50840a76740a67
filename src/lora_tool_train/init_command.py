"""`lora-tool init`: a commented run.yaml to begin with, which trains as it stands."""

from __future__ import annotations

from pathlib import Path

import click

from lora_tool.cli.options import Sectioned
from lora_tool_train.methods import METHODS, Feedback, Method

_DATA = {
    "sft": "trl-lib/Capybara",
    "kto": "trl-lib/kto-mix-14k",
    "grpo": "trl-lib/ultrafeedback-prompt",
    "rloo": "trl-lib/ultrafeedback-prompt",
}
_RATES = {"reward": "1.0e-4", "sft": "2.0e-4", "grpo": "1.0e-5", "rloo": "1.0e-5"}
"""Methods that compare answers without a reward learn at a tenth of what sft takes to learn them."""
_LENGTH = "max_length: 1024 # longer rows are cut or dropped"
_REWARDS = """\
reward_model_name_or_path: trl-lib/Qwen2-0.5B-Reward # scores the answers; `lora-tool merge --rm` makes one
# reward_funcs: [my_rewards.score] # or score() of ./my_rewards.py; it must tell answers apart
max_completion_length: 256 # if every answer is cut here, raise it"""


def first_run(method: Method) -> str:
    """Return YAML that trains an adapter by `method` as it stands, from a small model and data set on the Hub."""
    template = Path(__file__).with_name("run.yaml.template").read_text(encoding="utf-8")
    return template.format(
        method=method.name,
        data=_DATA.get(method.name, "trl-lib/ultrafeedback_binarized"),
        task=method.task_type,
        rate=_RATES.get(method.name, "5.0e-6"),
        limits=_REWARDS if method.feedback is Feedback.REWARD else _LENGTH,
    )


@click.command(
    "init",
    cls=Sectioned,
    among="Training runs",
    no_args_is_help=True,
    short_help="Print a commented run.yaml to `train` with.",
    epilog="Example: lora-tool init reward > run.yaml",
)
@click.argument("method", type=click.Choice(list(METHODS)), metavar="METHOD")
def command(method: str) -> None:
    """Print a commented run.yaml for `lora-tool train METHOD`; it trains without changes.

    METHOD is reward, sft, dpo, kto, grpo, rloo, cpo or orpo. It names a small model and data set on the Hub: put yours
    there.
    """
    click.echo(first_run(METHODS[method]), nl=False)

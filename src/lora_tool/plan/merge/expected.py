"""What a plan would write, in the words of the rules that judge a merged model."""

from __future__ import annotations

from lora_tool.plan.core.plan import Plan
from lora_tool.rules.merged.subject import Expected


def expected(plan: Plan) -> Expected:
    """Return the tensors and files of the plan, as the LT6xx rules compare a folder with them."""
    return Expected(tensors={step.out.name: step.out for step in plan.steps}, files=plan.side_files)

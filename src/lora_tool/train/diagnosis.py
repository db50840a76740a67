"""Why a run does not learn, read from its log: pure, without torch.

A loss near 0 says nothing: GRPO's is 0 in every healthy run without a KL term, because its advantages are centred
(https://github.com/huggingface/trl/issues/3452). What tells is whether there is a gradient, and if not, why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_tool.train.methods import Feedback, Method

NO_GRADIENT = 1e-6
"""A gradient norm below this is none. A healthy adapter's is above 1e-3; equal pairs under DPO give 6e-8."""

_NOTHING = 1e-9

RARE = 256
"""Completions that may all be without a reward before it is called constant: a task that succeeds in 2 % of them is not
yet hopeless when 1 % of such runs see none (0.98 ** 256 = 0.6 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a step taught nothing: a code, what was seen, and what to change."""

    code: str
    message: str
    hint: str = ""
    """Empty where the guard finds it: it knows the dtypes, which the log does not tell."""
    rare: bool = False
    """Whether it may be luck: a reward of nothing, which the next completion may earn."""


@dataclass(slots=True, kw_only=True)
class SignalTracker:
    """Follows the log of one run. `window` are the optimizer steps without a signal after which it is doomed."""

    method: Method | None = None
    window: int = 10
    batch: int = 1
    """Rows, or completions, of one optimizer step."""
    mask_truncated: bool = False
    healthy: int = 0
    """Logs that showed learning."""
    first_bad: int | None = None
    """The step before the first of the logs in a row that showed none."""
    bad_logs: int = 0
    last: Cause | None = None
    last_step: int = 0
    reported: set[str] = field(default_factory=set)

    def observe(self, step: int, logs: Mapping[str, Any], gradient: float | None = None) -> Cause | None:
        """Take in one log and return what must stop the run, or None. `gradient` is a norm measured since the last."""
        if "loss" not in logs:
            return None
        broken = _not_finite(logs)
        if broken is not None:
            return broken
        cause = self.cause(logs, gradient)
        if cause is None:
            self.healthy += 1
            self.first_bad, self.bad_logs, self.last = None, 0, None
        else:
            self.first_bad = self.last_step if self.first_bad is None else self.first_bad
            self.bad_logs += 1
            self.last = cause
        self.last_step = step
        lasted = step - self.first_bad if self.first_bad is not None else 0
        enough = lasted >= self.window and not (cause and cause.rare and lasted * self.batch < RARE)
        # a run that has learned may have finished learning: all its rewards are equal because all are right
        return self.last if not self.healthy and self.bad_logs > 1 and enough else None

    def verdict(self) -> Cause | None:
        """Return why the whole run taught nothing, None if a part of it did."""
        return None if self.healthy else self.last

    def lost(self) -> int | None:
        """Return the step since which a run that had learned shows no signal, for at least the window."""
        if self.healthy and self.first_bad is not None and self.last_step - self.first_bad >= self.window:
            return self.first_bad
        return None

    def cause(self, logs: Mapping[str, Any], gradient: float | None = None) -> Cause | None:
        """Return why the steps behind one log taught nothing; None if they taught something."""
        norm = _number(logs.get("grad_norm"))
        norm = gradient if norm is None else norm
        if "reward" in logs or "frac_reward_zero_std" in logs:
            return _silent_rewards(logs, norm, mask_truncated=self.mask_truncated)
        if norm is not None and norm < NO_GRADIENT:
            return _no_gradient(norm, self.method)
        return _no_margin(logs) if self.method and self.method.feedback is Feedback.PREFERENCE else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _not_finite(logs: Mapping[str, Any]) -> Cause | None:
    loss, norm = _number(logs.get("loss")), _number(logs.get("grad_norm"))
    if norm is not None and not math.isfinite(norm):
        return Cause(code="nan-gradients", message=f"grad_norm is {norm} with loss {loss}")
    if loss is not None and not math.isfinite(loss):
        return Cause(code="nan-loss", message=f"loss is {loss}")
    return None


def _silent_rewards(logs: Mapping[str, Any], norm: float | None, *, mask_truncated: bool) -> Cause | None:
    """Return why an online method learned nothing: what its rewards say first, then what its gradient says."""
    silent = norm is not None and norm < NO_GRADIENT
    cause = _no_reward(logs) or (_endless_reward(logs) if silent or norm is None else None) or _equal_rewards(logs)
    if cause is not None or not silent:
        return cause
    if mask_truncated and (_number(logs.get("completions/clipped_ratio")) or 0.0) >= 1.0 - _NOTHING:
        return Cause(
            code="all-masked",
            message="every completion reaches max_completion_length, and mask_truncated_completions leaves out all of them",
            hint="a larger max_completion_length, or mask_truncated_completions: false",
        )
    return Cause(
        code="no-gradient",
        message=f"rewards differ (reward_std {_number(logs.get('reward_std')) or 0.0:.3g}), but the gradient is {norm:.3g}: "
        "the adapter is frozen, switched off, or not part of the model that is trained",
        hint="look at requires_grad of the lora_ parameters, at model.active_adapters, and at lora_target_modules",
    )


def _per_function(logs: Mapping[str, Any], what: str) -> dict[str, float]:
    """Return function → its ``rewards/<function>/<what>``, 0 where it has none."""
    return {
        name.removeprefix("rewards/").removesuffix(f"/{what}"): _number(value) or 0.0
        for name, value in logs.items()
        if name.startswith("rewards/") and name.endswith(f"/{what}")
    }


def _no_reward(logs: Mapping[str, Any]) -> Cause | None:
    reward = _number(logs.get("reward"))
    if "reward" not in logs or (reward is not None and not math.isnan(reward)):
        return None
    return Cause(
        code="reward-none",
        message=f"every reward function returned None or NaN ({', '.join(_per_function(logs, 'std')) or 'no function'})",
        hint="let a reward function in reward_funcs return a number for at least two completions of a prompt",
    )


def _endless_reward(logs: Mapping[str, Any]) -> Cause | None:
    endless = [name for name, value in _per_function(logs, "mean").items() if math.isinf(value)]
    if not endless:
        return None
    return Cause(
        code="reward-infinite",
        message=f"a reward is infinite ({', '.join(endless)}), so no completion of its prompt has an advantage",
        hint=f"let {endless[0]} in reward_funcs return finite numbers",
    )


def _equal_rewards(logs: Mapping[str, Any]) -> Cause | None:
    if _number(logs.get("frac_reward_zero_std")) != 1.0:
        return None
    reward = f"{_number(logs.get('reward')) or 0.0:.3g}"
    spread = [name for name, value in _per_function(logs, "std").items() if value > NO_GRADIENT]
    if len(spread) > 1 and (_number(logs.get("reward_std")) or 0.0) < NO_GRADIENT:
        return Cause(
            code="reward-cancels",
            message=f"the sum of the rewards is {reward} for every completion, though each varies: {', '.join(spread)}",
            hint="reward_weights: give them weights that do not cancel",
        )
    return Cause(
        rare=(_number(logs.get("reward")) or 0.0) <= 0.0,
        code="reward-constant",
        message=f"all completions of a prompt get the same reward (mean {reward}), so no advantage and no gradient",
        hint="a reward in reward_funcs that tells completions apart; more num_generations or a higher temperature",
    )


def _no_gradient(norm: float, method: Method | None) -> Cause:
    preference = method is not None and method.feedback is Feedback.PREFERENCE
    return Cause(
        code="no-gradient",
        message=f"the gradient is {norm:.3g}: "
        + ("chosen and rejected are the same to the model, or " if preference else "every label is masked, or ")
        + "the adapter is frozen or switched off",
        hint="look at the data, at requires_grad of the lora_ parameters, and at lora_target_modules",
    )


def _no_margin(logs: Mapping[str, Any]) -> Cause | None:
    margin, chosen, rejected = (_number(logs.get(f"rewards/{name}")) for name in ("margins", "chosen", "rejected"))
    if margin is None or abs(margin) > _NOTHING or chosen is None or abs(chosen) <= _NOTHING or chosen != rejected:
        return None
    return Cause(
        code="no-margin",
        message=f"chosen and rejected get the same reward in every row ({chosen:.3g}); the loss falls without a preference",
        hint="look whether chosen and rejected are the same, also after they are cut at max_length",
    )

"""Why a run does not learn, read from its log: pure, without torch.

A loss near 0 says nothing: GRPO's is 0 in every healthy run without a KL term, because its advantages are centred
(https://github.com/huggingface/trl/issues/3452). What tells is whether there is a gradient, and if not, why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from lora_tool.core.report import Finding
from lora_tool_train.methods import Feedback, Method
from lora_tool_train.traps import trap

NO_GRADIENT = 1e-6
"""A gradient norm below this is none. A healthy adapter's is above 1e-3; equal pairs under DPO give 6e-8."""

_NOTHING = 1e-9

RARE = 256
"""Completions that may all be without a reward before it is called constant: a task that succeeds in 2 % of them is not
yet hopeless when 1 % of such runs see none (0.98 ** 256 = 0.6 %)."""


class SignalTracker(Struct, kw_only=True):
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
    last: Finding | None = None
    """Why the last log showed none."""
    last_step: int = 0
    reported: set[str] = field(default_factory=set)

    def observe(self, step: int, logs: Mapping[str, Any], gradient: float | None = None) -> Finding | None:
        """Take in one log and return what must stop the run, or None. `gradient` is a norm measured since the last."""
        if "loss" not in logs:
            return None
        broken = _not_finite(logs)
        if broken is not None:
            return broken
        self.last = self.cause(logs, gradient)
        if self.last is None:
            self.healthy += 1
            self.first_bad, self.bad_logs = None, 0
        else:
            self.first_bad = self.last_step if self.first_bad is None else self.first_bad
            self.bad_logs += 1
        self.last_step = step
        lasted = 0 if self.first_bad is None else step - self.first_bad
        # a reward of nothing may be bad luck: the next completion may earn one
        rare = self.last and self.last.code == "reward-constant" and (_numbers(logs).get("reward", 0.0) <= 0.0)
        enough = self.bad_logs > 1 and lasted >= self.window and not (rare and lasted * self.batch < RARE)
        # a run that has learned may have finished learning: all its rewards are equal because all are right
        return self.last if enough and not self.healthy else None

    def verdict(self) -> Finding | None:
        """Return why the whole run taught nothing, None if a part of it did."""
        return None if self.healthy else self.last

    def lost(self) -> int | None:
        """Return the step since which a run that had learned shows no signal, for at least the window."""
        since = self.first_bad
        return since if self.healthy and since is not None and self.last_step - since >= self.window else None

    def cause(self, logs: Mapping[str, Any], gradient: float | None = None) -> Finding | None:
        """Return why the steps behind one log taught nothing; None if they taught something."""
        figures = _numbers(logs)
        norm = figures.get("grad_norm", gradient)
        if "reward" in logs or "frac_reward_zero_std" in logs:
            return _silent_rewards(logs, figures, norm, mask_truncated=self.mask_truncated)
        preference = self.method is not None and self.method.feedback is Feedback.PREFERENCE
        if norm is not None and norm < NO_GRADIENT:
            data = "the model sees no difference between chosen and rejected" if preference else "every label is masked"
            why = f"the gradient is {norm:.3g}: {data}, or the adapter is frozen or switched off"
            hint = "check the data, requires_grad of the lora_ parameters, and lora_target_modules"
            return trap("no-gradient", hint, why=why)
        return _no_margin(figures) if preference else None


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}


def _not_finite(logs: Mapping[str, Any]) -> Finding | None:
    """Return what is said of a loss or gradient that is NaN or infinite; the hint is the guard's, who knows the dtypes."""
    loss, norm = (_numbers(logs).get(name, 0.0) for name in ("loss", "grad_norm"))
    if not math.isfinite(norm):
        return trap("nan-gradients", None, what=f"grad_norm is {norm} with loss {loss}")
    return None if math.isfinite(loss) else trap("nan-loss", None, what=f"loss is {loss}")


def _silent_rewards(
    logs: Mapping[str, Any], figures: Mapping[str, float], norm: float | None, *, mask_truncated: bool
) -> Finding | None:
    """Return why an online method learned nothing: what its rewards say first, then what its gradient says."""
    silent, spread = norm is not None and norm < NO_GRADIENT, figures.get("reward_std", 0.0)
    endless = _functions(figures, "mean", math.isinf)
    if "reward" in logs and math.isnan(figures.get("reward", math.nan)):
        functions = ", ".join(_functions(logs, "std")) or "no function"
        hint = "make a reward function in reward_funcs return a number for at least two completions of a prompt"
        return trap("reward-none", hint, functions=functions)
    if endless and (silent or norm is None):
        hint = f"make {endless[0]} in reward_funcs return finite numbers"
        return trap("reward-infinite", hint, functions=", ".join(endless))
    if figures.get("frac_reward_zero_std") == 1.0:
        return _equal_rewards(figures, spread)
    if not silent:
        return None
    if mask_truncated and figures.get("completions/clipped_ratio", 0.0) >= 1.0 - _NOTHING:
        return trap("all-masked", "raise max_completion_length, or set mask_truncated_completions: false")
    hint = "check requires_grad of the lora_ parameters, model.active_adapters, and lora_target_modules"
    why = (
        f"rewards differ (reward_std {spread:.3g}), but the gradient is {norm:.3g}: the adapter is frozen, switched off, "
        "or not part of the model that is trained"
    )
    return trap("no-gradient", hint, why=why)


def _functions(logs: Mapping[str, Any], what: str, such: Callable[[float], bool] = lambda _: True) -> list[str]:
    """Return the reward functions whose ``rewards/<function>/<what>`` is `such`."""
    return [
        name.removeprefix("rewards/").removesuffix(f"/{what}")
        for name, value in logs.items()
        if name.startswith("rewards/") and name.endswith(f"/{what}") and such(value)
    ]


def _equal_rewards(figures: Mapping[str, float], spread: float) -> Finding:
    reward, varied = figures.get("reward", 0.0), _functions(figures, "std", lambda value: value > NO_GRADIENT)
    if len(varied) > 1 and spread < NO_GRADIENT:
        hint = "set reward_weights that do not cancel each other"
        return trap("reward-cancels", hint, reward=reward, functions=", ".join(varied))
    hint = "use a reward in reward_funcs that tells completions apart, more num_generations or a higher temperature"
    return trap("reward-constant", hint, reward=reward)


def _no_margin(figures: Mapping[str, float]) -> Finding | None:
    margin, chosen, rejected = (figures.get(f"rewards/{name}") for name in ("margins", "chosen", "rejected"))
    if margin is None or abs(margin) > _NOTHING or chosen is None or abs(chosen) <= _NOTHING or chosen != rejected:
        return None
    hint = "check that chosen and rejected differ, also after they are cut at max_length"
    return trap("no-margin", hint, reward=chosen)

"""Why a run does not learn, read from its log: pure, without torch.

A loss near 0 says nothing: GRPO's is 0 in every healthy run without a KL term, because its advantages are centred
(https://github.com/huggingface/trl/issues/3452). What tells is whether there is a gradient, and if not, why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

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
    unlabelled: bool = False
    """Whether none of the rows that were read has a label."""
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
        """Take in one log and return what must stop the run, or None.

        `gradient` is the largest norm measured since the last log; what is logged is that of the last step.
        """
        if "loss" not in logs:
            return None
        loss, norm = (_numbers(logs).get(name, 0.0) for name in ("loss", "grad_norm"))
        if not math.isfinite(norm):  # the hint is the guard's, who knows the dtypes
            return trap("nan-gradients", None, what=f"grad_norm is {norm} with loss {loss}")
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
        return self.verdict() if enough else None

    def remember(self, history: Iterable[Mapping[str, Any]], step: int) -> None:
        """Take in the logs of a run that is resumed at `step`: whether it had learned, not since when it does not."""
        logged = (logs for logs in history if "loss" in logs and math.isfinite(_numbers(logs).get("grad_norm", 0.0)))
        self.healthy += sum(self.cause(logs) is None for logs in logged)
        self.last_step = step

    @property
    def has_seen(self) -> bool:
        """Whether a log has shown anything, also before the run was resumed."""
        return bool(self.healthy or self.last)

    def verdict(self) -> Finding | None:
        """Return why the whole run taught nothing, and in which steps; None if a part of it did."""
        if self.healthy or self.last is None:
            return None
        return replace(
            self.last, message=f"{self.last.message} (steps {(self.first_bad or 0) + 1} to {self.last_step})"
        )

    def lost(self) -> int | None:
        """Return the step since which a run that had learned shows no signal, for at least the window."""
        since = self.first_bad
        return since if self.healthy and since is not None and self.last_step - since >= self.window else None

    def cause(self, logs: Mapping[str, Any], gradient: float | None = None) -> Finding | None:
        """Return why the steps behind one log taught nothing; None if they taught something."""
        figures = _numbers(logs)
        norm, loss = figures.get("grad_norm") if gradient is None else gradient, figures.get("loss", 0.0)
        if norm is None and not math.isfinite(loss):
            return trap("nan-loss", None, what=f"loss is {loss}, and no gradient is measured or logged")
        if "reward" in logs or "frac_reward_zero_std" in logs:
            return _silent_rewards(logs, figures, norm, mask_truncated=self.mask_truncated)
        preference = self.method is not None and self.method.feedback is Feedback.PREFERENCE
        if norm is not None and norm < NO_GRADIENT:
            return _no_preference(figures, norm) if preference else self._no_label(loss, norm)
        # a loss that is not finite, with a gradient that is: one of the steps had no label, the others taught
        return _no_margin(figures) if preference else None

    def _no_label(self, loss: float, norm: float) -> Finding:
        """Return what was measured, and the cause where it was seen: the mean over no labels is NaN, its gradient 0."""
        seen = f"the loss is {loss:.3g} and the gradient {norm:.3g}"
        hint = "check the labels, requires_grad of the lora_ parameters, model.active_adapters, and lora_target_modules"
        if self.unlabelled or math.isnan(loss):
            seen += ": no row has a label (all are -100)"
            hint = "check the collator and the chat template, or raise max_length: the answers may be cut off"
        return trap("no-gradient", hint, why=seen)


def _no_preference(figures: Mapping[str, float], norm: float) -> Finding:
    margin = figures.get("rewards/margins", figures.get("margin"))
    apart = "" if margin is None else f", at a margin of {margin:.3g} between chosen and rejected"
    why = f"the loss is {figures.get('loss', 0.0):.3g} and the gradient {norm:.3g}{apart}"
    hint = "check that chosen and rejected differ, also after they are cut at max_length; then requires_grad of the "
    return trap("no-gradient", f"{hint}lora_ parameters", why=why)


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}


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
    why = f"rewards differ (reward_std {spread:.3g}), but the loss is {figures.get('loss', 0.0):.3g} and the gradient "
    return trap("no-gradient", hint, why=f"{why}{norm:.3g}")


def _functions(logs: Mapping[str, Any], what: str, such: Callable[[float], bool] = lambda _: True) -> list[str]:
    """Return the reward functions whose ``rewards/<function>/<what>`` is `such`."""
    return [
        name.removeprefix("rewards/").removesuffix(f"/{what}")
        for name, value in logs.items()
        if name.startswith("rewards/") and name.endswith(f"/{what}") and such(value)
    ]


def _equal_rewards(figures: Mapping[str, float], spread: float) -> Finding:
    reward, varied = figures.get("reward", 0.0), _functions(figures, "std", lambda value: value > NO_GRADIENT)
    if varied and spread < NO_GRADIENT:
        hint = "reward_weights: weights that do not cancel each other, and not 0 for a reward that varies"
        return trap("reward-cancels", hint, reward=reward, functions=", ".join(varied))
    hint = "use a reward in reward_funcs that tells completions apart, more num_generations or a higher temperature"
    return trap("reward-constant", hint, reward=reward)


def _no_margin(figures: Mapping[str, float]) -> Finding | None:
    margin, chosen, rejected = (figures.get(f"rewards/{name}") for name in ("margins", "chosen", "rejected"))
    if margin is None or abs(margin) > _NOTHING or chosen is None or abs(chosen) <= _NOTHING or chosen != rejected:
        return None
    hint = "check that chosen and rejected differ, also after they are cut at max_length"
    return trap("no-margin", hint, reward=chosen)

"""The use cases as functions with keywords, as `from lora_tool import …` gives them: each runs its workflow quietly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar, overload

from lora_tool.core.options import Options, called_with
from lora_tool.plans.merge.options import MergeArguments
from lora_tool.workflows import combine as combining
from lora_tool.workflows import consolidate as consolidating
from lora_tool.workflows import convert as converting
from lora_tool.workflows import extract as extracting
from lora_tool.workflows import inspect as inspecting
from lora_tool.workflows import merge as merging
from lora_tool.workflows import merge_each as merging_each
from lora_tool.workflows import prepare as preparing
from lora_tool.workflows import resize as resizing
from lora_tool.workflows import validate as validating
from lora_tool.workflows import verify as verifying
from lora_tool.workflows.caller import Caller, Done
from lora_tool.workflows.notebook import default_watch
from lora_tool.workflows.written import Written

_Chosen = TypeVar("_Chosen", bound=Options)
_First = TypeVar("_First")
_Second = TypeVar("_Second")
_Result = TypeVar("_Result")


@overload
def _quiet(
    function: Callable[[_First, _Second, _Chosen], _Result],
) -> Callable[[_First, _Second, _Chosen], _Result]: ...
@overload
def _quiet(function: Callable[[_First, _Chosen], _Result]) -> Callable[[_First, _Chosen], _Result]: ...


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the workflow for a library's caller, which sees the progress that it watches, in a notebook always."""

    @functools.wraps(function)
    def call(*given: Any) -> Any:  # noqa: ANN401 - whatever the workflow returns
        watch = getattr(given[-1], "watch", None)
        return function(*given, Caller(progress=watch or default_watch()))

    return call


@overload
def _writing(function: Callable[[_First, _Second, _Chosen], Done]) -> Callable[[_First, _Second, _Chosen], Written]: ...
@overload
def _writing(function: Callable[[_First, _Chosen], Done]) -> Callable[[_First, _Chosen], Written]: ...


def _writing(function: Callable[..., Done]) -> Callable[..., Written]:
    """Return the workflow as the library has it: the whole folder is written, and returned."""
    quiet: Callable[..., Done] = _quiet(function)

    @functools.wraps(quiet)
    def call(*given: Any) -> Written:
        done = quiet(*given)
        if not isinstance(done, Written):
            raise TypeError(f"a whole folder was to be written, not {done!r}")
        return done

    vars(call)["__signature__"] = signature(function, eval_str=True).replace(return_annotation=Written)
    return call


merge = called_with(MergeArguments)(_writing(merging.merge))
merge_each = called_with(MergeArguments)(_quiet(merging_each.merge_each))
combine = called_with(combining.CombineOptions)(_writing(combining.combine))
resize = called_with(resizing.ResizeOptions)(_writing(resizing.resize))
extract = called_with(extracting.ExtractOptions)(_writing(extracting.extract))
prepare = called_with(preparing.PrepareOptions)(_writing(preparing.prepare))
convert = called_with(converting.ConvertOptions)(_writing(converting.convert))
consolidate = called_with(consolidating.ConsolidateOptions)(_writing(consolidating.consolidate))
verify = called_with(verifying.VerifyOptions)(_quiet(verifying.verify))
validate = called_with(validating.ValidateFolderOptions)(_quiet(validating.validate))
inspect = called_with(inspecting.InspectOptions)(inspecting.inspect)

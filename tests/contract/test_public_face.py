"""What `from lora_tool import …` gives: documented, typed, with every type that it takes or returns."""

from __future__ import annotations

import enum
import inspect
import pickle
import pydoc
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import StructMeta
from msgspec.structs import replace

import lora_tool
from lora_tool.core import errors
from lora_tool.hub.model import PushContent
from lora_tool.plans.core.factor_ops import SmallMatrix

FIXTURES = Path(__file__).parents[2] / "fixtures"

FUNCTIONS = [name for name in lora_tool.__all__ if inspect.isfunction(getattr(lora_tool, name))]


def classes(annotation: object) -> Iterator[type]:
    """Yield the classes of ours that an annotation is made of."""
    if isinstance(annotation, type) and annotation.__module__.startswith("lora_tool"):
        yield annotation
    for part in typing.get_args(annotation):
        for inner in part if isinstance(part, list) else [part]:
            yield from classes(inner)


def test_every_name_is_there() -> None:
    assert dir(lora_tool) == sorted(lora_tool.__all__)
    assert {"merge", "consolidate", "inspect", "diff", "ls", "validate", "verify", "execute"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_returns_and_raises_and_its_types_can_be_imported(name: str) -> None:
    function = getattr(lora_tool, name)
    signature = inspect.signature(function, eval_str=True)
    assert signature.return_annotation is not inspect.Signature.empty
    assert "Raises" in (function.__doc__ or "")
    annotations = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
    for found in {inner for annotation in annotations for inner in classes(annotation)}:
        assert getattr(lora_tool, found.__name__, None) is found, f"{name}: {found} cannot be imported from lora_tool"


def test_every_error_that_a_caller_catches_can_be_imported() -> None:
    ours = {
        each.__name__: each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)
    }
    assert len(ours) > 20
    assert {name: getattr(lora_tool, name, None) for name in ours} == ours


def test_a_repr_holds_no_content() -> None:
    content = PushContent(name="README.md", data=b"never shown" * 1000)
    assert repr(content) == "PushContent('README.md': 11000 bytes)"
    assert "data" not in repr(SmallMatrix.of([[1.0] * 1000]))


def test_what_a_function_returns_has_a_text_an_html_form_and_json() -> None:
    data = {"Finding", "AdapterDir", "ModelDir", "NamedAdapters", "RunDir", "ShardedDir"}
    for name in FUNCTIONS:
        returned = inspect.signature(getattr(lora_tool, name), eval_str=True).return_annotation
        for kind in {found for found in classes(returned) if found.__name__ not in data}:
            forms = [getattr(kind, form, None) for form in ("to_json", "_repr_html_")]
            assert all(forms), f"{name}: {kind.__name__}"
            assert any("__str__" in vars(each) for each in kind.__mro__[:-1]), f"{name}: {kind.__name__} has no text"


RECORDS = [name for name in lora_tool.__all__ if isinstance(getattr(lora_tool, name), StructMeta)]


@pytest.mark.parametrize("name", RECORDS)
def test_help_of_a_record_names_its_fields(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(lora_tool, name)))
    assert all(field in text for field in getattr(lora_tool, name).__struct_fields__)


def test_enums_of_the_face_refuse_by_name() -> None:
    for name in lora_tool.__all__:
        words = getattr(lora_tool, name)
        if inspect.isclass(words) and issubclass(words, enum.Enum) and words is not lora_tool.DType:
            with pytest.raises(lora_tool.LoraToolError, match=r"expected one of .*, found 'poetry'"):
                words("poetry")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_names_every_parameter(name: str) -> None:
    function = getattr(lora_tool, name)
    missing = [each for each in inspect.signature(function).parameters if f"`{each}`" not in (function.__doc__ or "")]
    assert missing == []


ADAPTER, BASE = FIXTURES / "reward-qwen2" / "adapter", FIXTURES / "reward-qwen2" / "base"
WRONG = [
    (lora_tool.plan_merge, (BASE, ADAPTER), {"task": "rm"}, "reward"),
    (lora_tool.plan_merge, (BASE, ADAPTER), {"precision": "float16"}, "float64"),
    (lora_tool.plan_merge, (BASE, ADAPTER), {"dtype": "int8"}, "bfloat16"),
    (lora_tool.plan_merge, (BASE, ADAPTER), {"expert_layout": "x"}, "rank_major"),
    (lora_tool.plan_merge, (BASE, ADAPTER), {"fail_on": "note"}, "warning"),
    (lora_tool.merge, (ADAPTER,), {"max_shard_size": "five"}, "5GB"),
    (lora_tool.merge, (ADAPTER,), {"jobs": 0}, "at least 1"),
    (lora_tool.merge, (ADAPTER,), {"untie": "no"}, "True or False"),
    (lora_tool.validate, (ADAPTER,), {"task": "rm"}, "reward"),
    (lora_tool.validate, (ADAPTER,), {"ignore": ["LT9999"]}, "LT9"),
    (lora_tool.validate, (ADAPTER,), {"servers": ["vlm"]}, "vllm"),
    (lora_tool.plan_consolidate, (FIXTURES / "zero" / "stage3-reward",), {"what": "x"}, "adapter"),
    (partial(lora_tool.verify, base=BASE, adapters=[ADAPTER]), (BASE,), {"level": "x"}, "sample"),
]


@pytest.mark.parametrize(("function", "arguments", "wrong", "choice"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_value_is_named_with_the_choices(
    function: Any, arguments: tuple[Path, ...], wrong: dict[str, Any], choice: str
) -> None:
    with pytest.raises(lora_tool.LoraToolError) as raised:
        function(*arguments, **wrong)
    assert isinstance(raised.value, ValueError)
    (value,) = wrong.values()
    assert str(value if not isinstance(value, list) else value[0]) in str(raised.value)
    assert choice in f"{raised.value} {raised.value.hint}"


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (lora_tool.merge, ("a",), {"dtpe": "float32"}, "merge() has no argument `dtpe` Did you mean 'dtype'?"),
    (lora_tool.merge, ("a", "out"), {}, "merge() takes 1 argument without a name, found 2"),
    (lora_tool.merge, ("a", "out"), {}, "name the others: merge(adapters, out=…, base=…"),
    (lora_tool.merge, ("a",), {"adapters": "b"}, "merge() got `adapters` twice"),
    (lora_tool.combine, (["a"],), {}, "combine() needs `out`"),
    (lora_tool.convert, (), {"too": "mlx"}, "convert() has no argument `too` Did you mean 'to'?"),
    (lora_tool.ls, ("a",), {"criterea": None}, "ls() has no argument `criterea` Did you mean 'criteria'?"),
    (lora_tool.diff, ("a",), {}, "diff() needs `second`"),
]


@pytest.mark.parametrize(("function", "inputs", "keywords", "said"), CALLS, ids=range(len(CALLS)))
def test_a_wrong_call_is_named_with_the_function_and_the_argument(
    function: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], said: str
) -> None:
    with pytest.raises(lora_tool.WrongCall) as raised:
        function(*inputs, **keywords)
    assert isinstance(raised.value, TypeError)
    assert said in f"{raised.value} {raised.value.hint}"


def test_an_argument_without_a_name_may_have_its_name() -> None:
    judge: Any = lora_tool.validate
    assert judge(checkpoint=ADAPTER, base=BASE) == judge(ADAPTER, base=BASE)


def test_a_traceback_shows_the_hint_of_today() -> None:
    error = lora_tool.LoraToolError("what is wrong", hint="an early one")
    error.hint = "what to do"
    assert error.__notes__ == ["hint: what to do"]
    error.hint = None
    assert error.__notes__ == []


def test_a_run_is_judged_as_the_command_judges_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "reward-run", run)
    shutil.copytree(ADAPTER, run, dirs_exist_ok=True)
    (table,) = lora_tool.validate(run).runs
    assert [row.name for row in table.checkpoints] == ["checkpoint-2", "checkpoint-4", "(finished)"]


def test_paths_strings_and_opened_checkpoints_are_the_same() -> None:
    opened = lora_tool.open_checkpoint(BASE), lora_tool.open_checkpoint(ADAPTER)
    plans = [
        lora_tool.plan_merge(base, adapter, dtype=dtype)
        for base, adapter, dtype in (
            (BASE, ADAPTER, "bfloat16"),
            (str(BASE), str(ADAPTER), "bf16"),
            (*opened, lora_tool.DType.BF16),
        )
    ]
    assert plans[0] == plans[1] == plans[2]
    assert lora_tool.validate(ADAPTER, base=BASE) == lora_tool.validate(opened[1], base=opened[0])
    assert lora_tool.inspect(ADAPTER) == lora_tool.inspect(str(ADAPTER)) == lora_tool.inspect(opened[1])
    assert lora_tool.diff(ADAPTER, opened[1]).same


def test_what_a_notebook_shows_is_short_escaped_and_the_commands_text(tmp_path: Path) -> None:
    hostile = tmp_path / "<script>"
    shutil.copytree(ADAPTER, hostile)
    plan = lora_tool.plan_merge(BASE, hostile)
    many = replace(plan, shards=tuple(replace(shard, steps=shard.steps * 20) for shard in plan.shards))
    assert sum(1 for _ in many.steps) >= 300
    report, inspection = lora_tool.validate(hostile, base=BASE), lora_tool.inspect(hostile)
    base = lora_tool.open_checkpoint(BASE)
    written = lora_tool.merge(hostile, base=BASE, out=tmp_path / "merged")
    lists = (
        lora_tool.diff(hostile, FIXTURES / "reward-run" / "checkpoint-2"),
        lora_tool.ls(tmp_path),
        written,
        lora_tool.verify(written.path, base=BASE, adapters=[hostile]),
    )
    for shown in (many, report, inspection, base, lora_tool.open_checkpoint(hostile), *lists):
        assert len(repr(shown)) < 2_000, type(shown)
    for shown in (many, report, inspection, *lists):
        page = shown._repr_html_()
        assert "<script>" not in page
        assert len(page) < 25_000
    done = subprocess.run(
        [sys.executable, "-m", "lora_tool", "validate", hostile, "--base", BASE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(f"{report}\n")  # and what is typed next


def test_a_hint_speaks_of_arguments_here_and_of_options_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lora_tool.json").write_text("{}")
    with pytest.raises(lora_tool.LoraToolError) as raised:
        lora_tool.merge(ADAPTER, out=tmp_path / "out")
    assert "`overwrite=True`" in str(raised.value.hint)
    words = ["merge", str(ADAPTER), "-o", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "lora_tool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "--overwrite replaces it" in done.stderr


def tree(root: type[BaseException]) -> Iterator[type[BaseException]]:
    yield root
    for kind in root.__subclasses__():
        yield from tree(kind)


def made(kind: type[errors.LoraToolError]) -> errors.LoraToolError:
    problem = errors.Problem(defect=errors.Defect.HOLE, path="a.safetensors", message="a hole", subject="x")
    given: dict[str, Any] = {
        "problem": problem,
        "message": "what is wrong",
        "package": "torch",
        "extra": "merge",
        "hint": "what to do",
    }
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


@pytest.mark.parametrize("kind", list(tree(errors.LoraToolError)))
def test_an_error_survives_pickling_with_its_fields(kind: type[errors.LoraToolError]) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
    assert again.hint

"""What holds for every rule: a page in one form, an injury that it must see, a permanent code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tool.checkpoints import open_checkpoint
from lora_tool.core.errors import Defect, UnknownRule
from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import RULES, SECTIONS, Need, chosen, expand, rule
from lora_tool.rules.engine.subjects import AdapterSubject, Subject
from tests.judging import judge
from tests.mutations import CAUSAL, MUTATIONS, break_, copy_of

PERMANENT = tuple(
    """
LT101 LT102 LT103 LT104 LT105 LT106 LT107 LT108 LT109 LT110 LT111 LT112 LT113 LT114 LT115 LT116
LT201 LT202 LT203 LT204 LT205 LT206 LT207 LT208 LT209 LT210 LT211 LT212 LT213 LT214 LT215 LT216 LT217 LT218 LT219 LT220
LT221
LT222 LT226 LT227 LT228 LT235
LT301 LT302 LT303 LT304 LT306 LT307 LT308 LT309 LT310 LT311 LT312
LT317 LT318 LT319 LT320 LT321 LT322 LT323 LT324 LT325 LT326
LT401 LT402 LT403 LT404 LT405 LT406 LT407 LT408 LT409 LT410 LT411 LT412 LT413 LT414 LT415 LT416
LT501 LT502 LT503 LT504 LT505 LT506 LT507 LT508 LT509 LT510 LT511 LT512
LT513 LT514 LT515 LT520 LT521 LT530
LT601 LT602 LT603 LT604 LT605 LT606 LT607 LT608 LT609 LT610 LT611 LT612 LT613 LT614 LT615 LT616 LT617 LT618 LT619 LT620
LT621 LT622 LT623 LT624 LT625 LT626 LT627
LT701 LT702 LT703 LT704 LT705 LT706 LT707 LT708 LT709
LT801 LT802 LT803 LT804 LT805 LT806 LT807 LT808 LT809 LT810 LT811 LT812 LT813 LT814 LT815 LT816 LT817 LT818 LT819
LT820 LT823 LT824 LT825
""".split()  # noqa: SIM905 - a table
)
"""Codes that were given out. One may be added here, none may ever leave or mean something else."""


def test_codes_are_permanent() -> None:
    assert tuple(sorted(RULES)) == PERMANENT


FAULTS = [Path(__file__).parents[1] / each for each in ("unit/test_zero_faults.py", "oracle/test_faults_of_kinds.py")]


def _file(function: Callable[..., object]) -> str:
    return function.__module__.rpartition(".")[2]


def test_every_rule_has_an_injury() -> None:
    zero = {code for code in RULES if code.startswith("LT4")}
    assert {mutation.code for mutation in MUTATIONS.values()} == set(RULES) - zero
    stray = {
        name for name, mutation in MUTATIONS.items() if _file(mutation.injure) != _file(RULES[mutation.code].check)
    }
    assert not stray, "an injury stands in the file of tests/mutations that has the name of its rule's file"
    # those of rank files are made by torch.save, in modules of their own
    assert zero == {code for path in FAULTS for code in re.findall("LT4[0-9]{2}", path.read_text())} & set(RULES)


def test_every_file_defect_has_an_injury(tmp_path: Path) -> None:
    met = set()
    for at, (name, mutation) in enumerate(MUTATIONS.items()):
        if mutation.code.startswith("LT1") or mutation.code == "LT214":
            folder = copy_of(mutation.of, tmp_path / str(at))
            break_(folder, name)
            met |= {problem.defect for problem in open_checkpoint(folder).problems}
    assert met == set(Defect)


@pytest.mark.parametrize("code", PERMANENT)
def test_page_has_its_sections(code: str) -> None:
    rule_ = RULES[code]
    assert tuple(rule_.sections()) == SECTIONS
    assert all(rule_.sections().values())
    assert rule_.title
    assert len(rule_.title) <= 72
    assert rule_.hint
    assert not rule_.hint.endswith(":")


def test_pages_are_different() -> None:
    assert len({found.title for found in RULES.values()}) == len(RULES)
    assert len({found.text for found in RULES.values()}) == len(RULES)


def test_select_and_ignore_take_beginnings() -> None:
    assert expand(["lt20"]) == {f"LT20{at}" for at in range(1, 10)}
    assert [found.code for found in chosen(["LT50"], ["LT502", "LT505", "LT507", "LT508", "LT509"])] == [
        "LT501",
        "LT503",
        "LT504",
        "LT506",
    ]
    assert len(chosen()) == len(RULES)


@pytest.mark.parametrize("code", ["LT9", "E501", "", "LT2011"])
def test_unknown_codes_are_refused(code: str) -> None:
    with pytest.raises(UnknownRule, match="There is no rule"):
        expand([code])


def test_unknown_code_names_the_closest() -> None:
    with pytest.raises(UnknownRule, match="Did you mean LT2"):
        expand(["LT2O6"])


@pytest.mark.parametrize("code", ["LT201", "LT1", "xx101"])
def test_a_code_is_given_once_and_well_formed(code: str) -> None:
    with pytest.raises(ValueError, match="not a free rule code"):
        rule(code, Severity.ERROR, on=Subject)


def test_what_could_not_run_is_said(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    break_(folder, "LT101")
    skipped = {skip.code: skip.reason for skip in judge(folder).skipped}
    assert set(skipped) >= {
        code
        for code, found in RULES.items()
        if Need.WEIGHTS in found.needs and Need.SERVER not in found.needs and issubclass(AdapterSubject, found.on)
    }
    assert "cannot be read" in skipped["LT201"]
    alone = copy_of(CAUSAL, tmp_path / "without base")
    shutil.rmtree(alone.parent / "base")
    assert "no base model" in {skip.code: skip.reason for skip in judge(alone).skipped}["LT501"]

"""The documentation builds without a warning and without a network, and has everything that the program has."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lora_tool
from lora_tool.cli.main import all_commands
from lora_tool.rules.engine.registry import RULES
from lora_tool.verification.validating import validate
from lora_tool_train.traps import CODES as GUARDS
from tests.made_once import made_once
from tests.readme import DOCUMENTATION, PAGES, README, ROOT

pytest.importorskip("sphinx", reason="sphinx is not installed: pip install 'lora-tool[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "site", _build) / "html"


def _build(out: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(out / "doctrees")]
    done = subprocess.run(
        [*command, str(DOCUMENTATION), str(out / "html")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Page(HTMLParser):
    """The anchors and links of a page, and whatever it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name == "href" and value and tag == "a":
                self.links.add(value)
            elif (name == "src" or (name == "href" and tag == "link")) and value:
                self.loads.add(value)


def test_reference_has_everything(site: Path) -> None:
    assert validate.__module__  # importing it registers every rule
    rules = Page(site / "reference" / "rules.html").anchors
    assert {code.lower() for code in RULES} <= rules
    assert set(GUARDS) <= Page(site / "reference" / "guards.html").anchors
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"lora-tool {name}" in commands for name in all_commands())
    python = Page(site / "reference" / "python.html").anchors
    assert {f"lora_tool.{name}" for name in lora_tool.__all__ if name != "__version__"} <= python


def test_options_keep_their_dashes(site: Path) -> None:
    assert not re.findall(r">[^<]*\s–[a-z][^<]*<", (site / "reference" / "commands.html").read_text())


OF_USE = [page for page in PAGES if page.parent != DOCUMENTATION / "reference" and DOCUMENTATION in page.parents]
WITHOUT_NEEDS = {"index.md", "glossary.md", "changelog.md"}


@pytest.mark.parametrize(
    "page", [page for page in OF_USE if page.name not in WITHOUT_NEEDS], ids=lambda page: page.name
)
def test_the_first_line_says_what_is_needed(page: Path) -> None:
    assert page.read_text().split("\n\n")[1].startswith("Needs: ")


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        assert not {loaded for loaded in page.loads if "://" in loaded or loaded.startswith("//")}, path.name
        for link in page.links:
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            reached = (path.parent / target).resolve() if target else path
            assert reached.exists(), f"{path.name}: {link}"
            if anchor and reached in pages:
                assert anchor in pages[reached].anchors, f"{path.name}: {link}"


def test_llms_txt_lists_every_page(site: Path) -> None:
    listed = re.findall(r"\]\((.+?)\)", (site / "llms.txt").read_text())
    pages = {str(page.relative_to(DOCUMENTATION).with_suffix(".html")) for page in DOCUMENTATION.rglob("*.md")}
    assert set(listed) == pages - {"index.html"} | {"lora-tool/SKILL.md"}
    assert all((site / path).is_file() for path in listed)


def test_pages_can_be_read_where_they_lie() -> None:
    for page in (README, *(ROOT / ".github").glob("*.md"), *PAGES):
        for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"

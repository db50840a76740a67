"""Pictures: the numbers of the heat maps, a page that needs no network, a PNG that shows something."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from lora_tool.checkpoint import AdapterDir, open_checkpoint
from lora_tool.errors import ExecutionError, NotACheckpoint
from lora_tool.formats.trainer_state import read_trainer_state
from lora_tool.inspection.curves import training_curves
from lora_tool.inspection.spectra import Spectrum, spectra
from lora_tool.pictures.drawing import draw
from lora_tool.pictures.grid import grids
from lora_tool.pictures.page import page

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINED = FIXTURES / "reward-run" / "checkpoint-4"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def spectrum(
    module: str, *values: float, target: str = "up", layer: int | None = 0, base: float | None = None
) -> Spectrum:
    return Spectrum(module=module, target=target, layer=layer, rank=len(values), singular_values=values, base_norm=base)


class Links(HTMLParser):
    """Collects everything that a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.found.append(tag)
        self.found += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "action") or name[:2] == "on"
        ]


def test_cells_are_modules_by_target_and_layer() -> None:
    relative, rank, *_ = grids(
        [
            spectrum("a.0.up", 3.0, 4.0, base=10, target="a.*.up"),
            spectrum("a.1.up", 6.0, 8.0, base=10, target="a.*.up", layer=1),
            spectrum("a.1.down", 1.0, base=2, target="a.*.down", layer=1),
            spectrum("head", 2.0, base=2, target="head", layer=None),
        ]
    )
    assert relative.title == "‖ΔW‖ / ‖W‖"
    assert (relative.rows, relative.columns) == (("up", "down", "head"), ("0", "1", "–"))
    assert relative.cells == ((0.5, 1.0, None), (None, 0.5, None), (None, None, 1.0))
    assert relative.most == 1
    assert rank.cells[1] == (None, 1.0, None)


def test_experts_of_one_layer_share_a_cell_and_say_so() -> None:
    grid, _ = grids([spectrum(f"e.{n}", float(n), target="e.*") for n in range(1, 4)])
    assert grid.rows == ("e.* (largest of 3)",) or grid.rows[0].endswith("(largest of 3)")
    assert grid.cells == ((3.0,),)


def test_without_one_base_norm_no_map_is_relative() -> None:
    grid, _ = grids([spectrum("a", 1.0, base=2), spectrum("b", 1.0, target="b")])
    assert grid.title == "‖ΔW‖"


def test_page_fetches_and_runs_nothing(tmp_path: Path) -> None:
    draw(open_checkpoint(TRAINED), tmp_path / "page.html", base=None, facts=[("base model", "some/base")])
    text = (tmp_path / "page.html").read_text()
    links = Links()
    links.feed(text)
    assert [link for link in links.found if not re.match(r"(xlink:)?href=#", link)] == []
    assert not re.search(r"url\((?!#)|@import", text)
    adapter = open_checkpoint(TRAINED)
    assert isinstance(adapter, AdapterDir)
    for item in spectra(adapter):
        assert f"<td>{item.module}</td>" in text
    assert "grad_norm" in text


def test_names_from_files_are_escaped() -> None:
    nasty = "</td><script>alert(1)</script>\u202e$x$"
    items = [spectrum(nasty, 1.0, target=nasty)]
    text = page(nasty, [("base model", nasty)], grids(items), items, {nasty: ((1.0, 2.0),)})
    assert "<script>" not in text
    assert "\u202e" not in text


def test_nan_is_shown_and_breaks_nothing() -> None:
    items = [spectrum("a", math.nan, math.nan), spectrum("b", 0.0, 0.0, layer=1), spectrum("c", 1.0, 0.5, layer=2)]
    text = page("t", [], grids(items), items, {})
    assert "layer 0: NaN" in text


def test_an_untrained_adapter_is_drawn_without_a_warning() -> None:
    items = [spectrum("a", 0.0, 0.0), spectrum("b", 0.0, 0.0, layer=1)]
    assert "layer 0: 0" in page("t", [], grids(items), items, {})


def test_picture_shows_something(tmp_path: Path) -> None:
    path = draw(open_checkpoint(TRAINED), tmp_path / "out.png")
    picture = imread(path)
    height, width, _ = picture.shape
    assert width > 1000
    assert height > 1000
    assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, 4)}) > 50
    assert list(tmp_path.iterdir()) == [path]


def test_curves_are_what_was_logged() -> None:
    history = json.loads((TRAINED / "trainer_state.json").read_text())["log_history"]
    curves = training_curves(read_trainer_state(TRAINED / "trainer_state.json"))
    assert list(curves["loss"]) == [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert next(iter(curves)) == "loss"
    assert not {"step", "epoch"} & curves.keys()


def test_a_run_folder_is_drawn_as_its_latest_checkpoint_with_the_curves(tmp_path: Path) -> None:
    page = draw(open_checkpoint(TRAINED.parent), tmp_path / "run.html").read_text()
    assert f"{TRAINED.parent.name} · {TRAINED.name}" in page
    assert "effective rank" in page
    assert "loss" in page


def test_nothing_to_draw_and_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="nothing to draw"):
        draw(open_checkpoint(FIXTURES / "reward-qwen2" / "base"), tmp_path / "x.png")
    with pytest.raises(ExecutionError, match="cannot be written"):
        draw(open_checkpoint(TRAINED), tmp_path / "missing" / "x.html")


@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
def test_a_browser_shows_the_page_without_a_network(tmp_path: Path) -> None:
    assert BROWSER is not None
    draw(open_checkpoint(TRAINED), tmp_path / "page.html")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--proxy-server=127.0.0.1:9",
        f"--user-data-dir={tmp_path}/b",
    ]
    shown = subprocess.run(
        [
            BROWSER,
            *flags,
            "--dump-dom",
            "--screenshot=shot.png",
            "--window-size=1150,2400",
            f"file://{tmp_path}/page.html",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "gate_proj" in shown.stdout
    assert "effective rank of ΔW" in shown.stdout
    shot = imread(tmp_path / "shot.png")
    coloured = (abs(shot[..., 0] - shot[..., 1]) > 0.2) | (abs(shot[..., 1] - shot[..., 2]) > 0.2)
    assert coloured.mean() > 0.01  # heat maps and lines, not only black text on white

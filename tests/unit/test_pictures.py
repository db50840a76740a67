"""Pictures: the numbers of the heat maps, a page that needs no network, a PNG that shows something."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from msgspec.structs import replace
from safetensors.torch import load_file

from lora_tool import diff
from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.core.display import four_digits
from lora_tool.core.errors import ExecutionError, NotACheckpoint
from lora_tool.formats.trainer_state import read_trainer_state
from lora_tool.workflows.inspection.comparison import Comparison, Difference, ModuleChange
from lora_tool.workflows.inspection.curves import training_curves
from lora_tool.workflows.inspection.spectra import Spectrum, spectra
from lora_tool_plot.changes import change_grids
from lora_tool_plot.drawing import draw, draw_comparison
from lora_tool_plot.grid import grids
from lora_tool_plot.margins import _edges
from lora_tool_plot.page import page
from lora_tool_plot.panels import CurvePanel, draw_curve, labelled
from lora_tool_plot.saving import save
from lora_tool_plot.sheet import sheet
from lora_tool_plot.theme import themed

FIXTURES = Path(__file__).parents[2] / "fixtures"
REWARD = FIXTURES / "reward-qwen2"
TRAINED = FIXTURES / "reward-run" / "checkpoint-4"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def spectrum(
    module: str, *values: float, target: str = "up", layer: int | None = 0, base: float | None = None
) -> Spectrum:
    return Spectrum(module=module, target=target, layer=layer, rank=len(values), singular_values=values, base_norm=base)


@pytest.fixture(scope="module")
def page_of_a_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(open_checkpoint(TRAINED), tmp_path_factory.mktemp("page") / "page.html", facts=[("base", "some/base")])


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


def test_cells_are_modules_by_target_and_layer_in_the_order_of_the_tables() -> None:
    moved, rank, *_ = grids(
        [
            spectrum("a.1.down_proj", 1.0, base=2, target="a.*.down_proj", layer=1),
            spectrum("head", 2.0, base=2, target="head", layer=None),
            spectrum("a.0.up_proj", 3.0, 4.0, base=10, target="a.*.up_proj"),
            spectrum("a.1.up_proj", 6.0, 8.0, base=10, target="a.*.up_proj", layer=1),
            spectrum("a.0.q_proj", 1.0, base=10, target="a.*.q_proj"),
        ]
    )
    assert moved.unit == "‖ΔW‖ / ‖W‖"
    assert (moved.rows, moved.columns) == (("q_proj", "up_proj", "down_proj", "head"), ("0", "1", "–"))
    assert moved.cells == ((0.1, None, None), (0.5, 1.0, None), (None, 0.5, None), (None, None, 1.0))
    assert rank.cells[2] == (None, 1.0, None)


def test_colours_begin_at_zero_or_are_logarithmic_and_end_at_round_numbers() -> None:
    moved, _ = grids([spectrum(f"m.{at}", value, layer=at) for at, value in enumerate((3.0, 4.0, 4.9, math.nan))])
    assert [moved.position(cell) for cell in moved.cells[0]] == [0.6, 0.8, pytest.approx(0.98), None]
    assert moved.marks == (0.0, 2.5, 5.0)
    wide, _ = grids([spectrum(f"m.{at}", value, layer=at) for at, value in enumerate((0.0099, 0.1, 1.9))])
    assert wide.logarithmic
    assert wide.marks == pytest.approx((0.005, 0.01, 0.1, 1.0, 2.0))
    assert [wide.position(cell) for cell in (0.005, 0.1, 2.0)] == pytest.approx([0.0, 0.5, 1.0])
    assert "logarithmic" in wide.said
    _, directions = grids([spectrum(f"m.{at}", 1.0, value, layer=at) for at, value in enumerate((0.3, 0.6))])
    assert directions.ends == (1.0, 2.0)


SCALES = [  # the numbers of the second over those of the first, the ends of the scale
    ((0.97, 1.1), (0.8, 1.25)),
    ((0.6, 1.1), (0.5, 2.0)),
    ((1.0, 7.0), (0.1, 10.0)),
]


@pytest.mark.parametrize(("times", "ends"), SCALES)
def test_ratios_have_two_colours_around_one(times: tuple[float, ...], ends: tuple[float, float]) -> None:
    differences = tuple(
        Difference(
            name=f"m.layers.{at}.q_proj", kind="LoRA", change=ModuleChange.CHANGED, first=1.0, second=value, apart=1.0
        )
        for at, value in enumerate(times)
    )
    *_, longer = change_grids(Comparison(fields={}, differences=differences))
    assert longer.ends == pytest.approx(ends)
    assert longer.position(1.0) == pytest.approx(0.5)
    assert "logarithmic" not in longer.said


def test_directions_without_anything_in_common_are_the_middle_of_all_there_can_be() -> None:
    turned = [math.sqrt(2.0) * value for value in (0.9, 1.1)]
    differences = tuple(
        Difference(
            name=f"m.layers.{at}.q_proj", kind="LoRA", change=ModuleChange.CHANGED, first=1.0, second=1.0, apart=value
        )
        for at, value in enumerate(turned)
    )
    _, cosine, _ = change_grids(Comparison(fields={}, differences=differences))
    assert (cosine.centre, cosine.ends) == (1.0, (0.0, 2.0))


COLUMNS = [
    (32, False, [28, 31]),
    (80, False, [76, 79]),
    (2, False, [0, 1]),
    (33, False, [30, 32]),
    (32, True, [31, 32]),
]


@pytest.mark.parametrize(("layers", "beside", "ends"), COLUMNS)
def test_the_last_layer_is_labelled(layers: int, beside: object, ends: list[int]) -> None:
    columns = (*map(str, range(layers)), *(["–"] if beside else []))
    assert labelled(columns, 24)[-2:] == ends


def test_a_folder_gets_a_file_for_each_figure(tmp_path: Path) -> None:
    draw(open_checkpoint(TRAINED), tmp_path / "plots")
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert names >= {"how-far-training-moved-each-weight", "singular-values", "training"}


def test_an_accuracy_ends_at_one() -> None:
    axes = Figure().subplots()
    draw_curve(axes, CurvePanel(name="rewards/accuracies", main=True, lines={"training": ((1, 1.0), (2, 1.0))}))
    assert axes.get_ylim()[1] == 1.0


@pytest.mark.parametrize(("pairs", "bars"), [(8, (4, 7)), (400, (20, 65))])
def test_bars_of_margins_are_few_and_begin_at_round_numbers(pairs: int, bars: tuple[int, int]) -> None:
    edges = _edges([0.1 * at - 0.13 for at in range(pairs)], pairs)
    assert bars[0] <= len(edges) - 1 <= bars[1]
    assert 0.0 in edges
    assert all(float(f"{edge:.3g}") == pytest.approx(edge) for edge in edges)


def test_a_map_of_one_colour_is_a_sentence() -> None:
    alike = [spectrum(f"m.{at}", value, value, layer=at) for at, value in enumerate((1.0, 1.01))]
    kept = [replace(item, kept=1 - 2e-4, base_norm=10.0) for item in alike]
    moved, rank, rounding = grids(kept)
    assert moved.said == "Every weight moved about equally: ‖ΔW‖ / ‖W‖ is 0.1414 to 0.1428."
    assert rank.said == "The effective rank of every ΔW is 2; its rank is 2."
    assert rounding.said == "Rounding to the base's dtype keeps every ΔW: 1 − cosine is at most 0.0002."
    with themed():
        text = page("t", [], (moved, rank, rounding), kept, {}, footer="")
    assert moved.said in text
    assert '<table class="map' not in text
    lost, *_ = (each for each in grids([replace(kept[0], kept=0.9), kept[1]]) if each.unit == "1 − cosine")
    assert lost.cells[0] == pytest.approx((0.1, 2e-4))
    assert not lost.flat


def test_the_page_has_the_numbers_of_the_formed_products(tmp_path: Path) -> None:
    adapter, base = open_checkpoint(REWARD / "adapter"), open_checkpoint(REWARD / "base")
    assert isinstance(base, ModelDir)
    text = draw(adapter, tmp_path / "page.html", base=base).read_text()
    stored = load_file(REWARD / "adapter" / "adapter_model.safetensors")
    weights = {k: v for path in (REWARD / "base").glob("*.safetensors") for k, v in load_file(path).items()}
    modules = [name.removesuffix(".lora_A.weight") for name in stored if name.endswith(".lora_A.weight")]
    assert len(modules) == 14
    for path in modules:
        delta = 2 * (stored[f"{path}.lora_B.weight"].double() @ stored[f"{path}.lora_A.weight"].double()).numpy()
        weight = weights[f"{path.removeprefix('base_model.model.')}.weight"].double().numpy()
        values = np.linalg.svd(delta, compute_uv=False)[:4]
        shares = values / values.sum()
        layer, name = path.split(".")[4], path.rpartition(".")[2]
        effective = math.exp(-(shares * np.log(shares)).sum())
        moved = np.linalg.norm(delta) / np.linalg.norm(weight)
        cells = re.findall(rf'title="{name}, layer {layer}: ([^"]+)"', text)
        assert [float(cell) for cell in cells[:2]] == pytest.approx([moved, effective], rel=1e-3)
        for value in (np.linalg.norm(delta), values[0]):
            assert f"<td>{four_digits(float(value))}</td>" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "items",
    [
        [spectrum(f"t{at}", 1.0 + at, 0.5, target=f"t{at}", layer=None) for at in range(130)],
        [spectrum(f"m.{at}", 1.0 + at % 7, 0.5, layer=at) for at in range(700)],
        [spectrum(f"m.{at}", 1e200 * 10**at, 1e180, layer=at) for at in range(4)],
        [spectrum("m.0", 5e-324, 0.0), spectrum("m.9", math.inf, 1.0, layer=9)],
        [spectrum(f"模型.{at}", 1.0 + at, target="模型.*.注意", layer=at) for at in range(2)],
    ],
    ids=["rows", "layers", "huge", "tiny", "letters"],
)
def test_whatever_is_in_a_file_is_drawn_in_bounded_space(tmp_path: Path, items: list[Spectrum]) -> None:
    curves, maps = {"loss": ((1.0, 1e300), (2e15, -1e300))}, grids(items)
    with themed():
        save(sheet("模", "", maps, items, curves, footer=""), tmp_path / "p.png")
        assert len(page("模", [], maps, items, curves, footer="")) < 2_000_000
    assert imread(tmp_path / "p.png").shape[0] < 10_000
    assert all(len(each.rows) <= 80 for each in maps)


@pytest.mark.parametrize(
    ("end", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".html", b"<!doctype html>")]
)
def test_every_form_is_what_its_name_says_and_the_same_again(tmp_path: Path, end: str, begin: bytes) -> None:
    files = {draw(open_checkpoint(FIXTURES / "causal-llama" / "adapter"), tmp_path / f"{n}{end}") for n in range(2)}
    (content,) = {path.read_bytes() for path in files}
    assert content.startswith(begin)


def test_a_comparison_is_drawn_with_numpys_numbers(tmp_path: Path) -> None:
    run = FIXTURES / "reward-run"
    path = tmp_path / "page.html"
    draw_comparison(diff(run / "checkpoint-2", run / "checkpoint-4"), path, names=("a/2", "a/4"))
    held = [load_file(run / name / "adapter_model.safetensors") for name in ("checkpoint-2", "checkpoint-4")]
    text = path.read_text()
    for module in (name.removesuffix(".lora_A.weight") for name in held[0] if name.endswith("lora_A.weight")):
        one, two = (2 * (t[f"{module}.lora_B.weight"].double() @ t[f"{module}.lora_A.weight"].double()) for t in held)
        cells = re.findall(rf'title="{module.rpartition(".")[2]}, layer {module.split(".")[4]}: ([^"]+)"', text)
        turned = 1 - float((one * two).sum() / one.norm() / two.norm())
        expected = [float((two - one).norm() / one.norm()), turned, float(two.norm() / one.norm())]
        assert [float(cell) for cell in cells] == pytest.approx(expected, rel=2e-3)
    draw_comparison(diff(run / "checkpoint-2", run / "checkpoint-2"), path, names=("a", "a"))
    assert "The two are equal everywhere." in path.read_text()


def test_page_fetches_and_runs_nothing(page_of_a_checkpoint: Path) -> None:
    text = page_of_a_checkpoint.read_text()
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
    text = page(nasty, [("base model", nasty)], grids(items), items, {nasty: ((1.0, 2.0),)}, footer=nasty)
    assert "<script>" not in text
    assert "\u202e" not in text


def test_nan_is_shown_and_breaks_nothing() -> None:
    items = [spectrum("a", math.nan, math.nan), spectrum("b", 0.0, 0.0, layer=1), spectrum("c", 1.0, 0.5, layer=2)]
    text = page("t", [], grids(items), items, {}, footer="")
    assert "layer 0: NaN" in text
    sheet("t", "", grids(items), items, {}, footer="").savefig(io.BytesIO())


def test_an_untrained_adapter_is_drawn_without_a_warning() -> None:
    items = [spectrum("a", 0.0, 0.0), spectrum("b", 0.0, 0.0, layer=1)]
    assert "Nothing moved: every ΔW is zero." in page("t", [], grids(items), items, {}, footer="")
    sheet("t", "", grids(items), items, {}, footer="").savefig(io.BytesIO())


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
def test_a_browser_shows_the_page_without_a_network(tmp_path: Path, page_of_a_checkpoint: Path) -> None:
    assert BROWSER is not None
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
            f"file://{page_of_a_checkpoint}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "gate_proj" in shown.stdout
    assert "How many directions each ΔW uses" in shown.stdout
    shot = imread(tmp_path / "shot.png")
    coloured = (abs(shot[..., 0] - shot[..., 1]) > 0.2) | (abs(shot[..., 1] - shot[..., 2]) > 0.2)
    assert coloured.mean() > 0.01  # heat maps and lines, not only black text on white

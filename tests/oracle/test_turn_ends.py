"""Where a chat template ends a turn, against what it renders; and that a merged model stops there."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lora_tool import execute, plan_merge, validate
from lora_tool.formats.tokenizer import read_tokenizer, turn_end

FIXTURE = Path(__file__).parents[2] / "fixtures" / "causal-llama"
_TRL = find_spec("trl")
PUBLISHED = sorted((Path(_TRL.origin).parent / "chat_templates").glob("*.jinja")) if _TRL and _TRL.origin else []
"""The templates of the model families that TRL trains."""
TOKEN = re.compile(r"<\|[^<>\n'\"]{1,40}\|>|<｜[^<>\n']{1,40}｜>|<end_of_[a-z]+>|<start_of_[a-z]+>|<turn\|>|<\|turn>")

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LLAMA3 = "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
LLAMA3 += "+ m['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
GEMMA = (
    "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
)
GEMMA += "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
MISTRAL = (
    "{% for m in messages %}{{ '[INST] ' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}"
)
MISTRAL += "{% endfor %}"


def rendered_end(template: str, tokens: set[str], eos: str) -> str:
    """Return the first special token behind the answer, as transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for content in ("ANSWER", [{"type": "text", "text": "ANSWER"}]):
        chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]
        try:
            (text,), _ = render_jinja_template([chat], chat_template=template, eos_token=eos, bos_token="<BOS>")
        except Exception:  # noqa: BLE001 - some want a list of parts, some a string
            continue
        if "ANSWER" not in text:
            continue
        found = re.search("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))), text.rpartition("ANSWER")[2])
        assert found, text
        return found[0]
    raise AssertionError("no form of a message can be rendered")


def folder_with(folder: Path, tokens: list[str], template: str, **special: str) -> Path:
    """Write the small files of a tokenizer whose special tokens have the ids 0, 1, 2 and so on."""
    added = [{"id": at, "content": token, "special": True} for at, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": added, "model": {"vocab": {}}})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(template)
    return folder


EOS = {"deepseek": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>", "llava_next": "</s>"}
"""The `eos_token` of the families whose template spells it out."""
IN_A_MESSAGE = ("<image>", "<fake_token_around_image>", "<|image_pad|>")
"""Special tokens of models that see, which stand in a message."""
ENDED = [path for path in PUBLISHED if not path.stem.startswith("glm4moe")]


@pytest.mark.parametrize("path", ENDED, ids=lambda path: path.stem)
def test_the_end_of_a_published_template_is_the_one_it_renders(path: Path, tmp_path: Path) -> None:
    template = path.read_text()
    eos = next((token for family, token in EOS.items() if path.stem.startswith(family)), "<EOS>")
    tokens = sorted({*TOKEN.findall(template), *IN_A_MESSAGE, eos})
    wanted = rendered_end(template, {*tokens}, eos)
    folder_with(tmp_path, tokens, template, eos_token=eos)
    end = turn_end(read_tokenizer(tmp_path, [each.name for each in tmp_path.iterdir()]))
    assert end is not None
    assert tokens.index(wanted) in end.ids
    if not path.stem.startswith("cohere2"):  # whose answers end with a token of their own before that of the turn
        assert end.token.token == wanted


def test_a_turn_that_ends_where_the_next_begins_has_no_end_of_its_own(tmp_path: Path) -> None:
    (path,) = (path for path in PUBLISHED if path.stem == "glm4moe")
    tokens = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>", "<|assistant|>"]
    folder_with(tmp_path, tokens, path.read_text(), eos_token=tokens[0])
    end = turn_end(read_tokenizer(tmp_path, [each.name for each in tmp_path.iterdir()]))
    assert end is not None
    assert (end.token.token, end.ids) == ("<|endoftext|>", frozenset({0}))


def injured(tmp_path: Path, tokens: list[str], template: str, **special: str) -> tuple[Path, Path]:
    shutil.copytree(FIXTURE, tmp_path / "here")
    base, adapter = tmp_path / "here" / "base", tmp_path / "here" / "adapter"
    folder_with(adapter, tokens, template, **special)
    return base, adapter


def rewritten(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2, sort_keys=True))


WORDS = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<start_of_turn>",
    "[/INST]",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.mark.parametrize(
    ("template", "special", "ends", "wanted"),
    [
        pytest.param(CHATML, SPECIAL, 1, [1, 4], id="the template's end is not the tokenizer's eos"),
        pytest.param(CHATML, {**SPECIAL, "eos_token": "<|im_end|>"}, 1, [1, 4], id="Qwen, both"),
        pytest.param(GEMMA, SPECIAL, 1, [1, 6], id="Gemma"),
        pytest.param(GEMMA, SPECIAL, [1, 6], [1, 6], id="Gemma, healthy"),
        pytest.param(LLAMA3, SPECIAL, 1, [1, 5], id="Llama 3 on a base without the turn's end"),
        pytest.param(LLAMA3, {**SPECIAL, "eos_token": "<|eot_id|>"}, [1, 5], [1, 5], id="Llama 3, a list"),
        pytest.param(MISTRAL, SPECIAL, 1, 1, id="Mistral"),
    ],
)
def test_a_merged_model_stops_where_its_template_ends_a_turn(
    template: str, special: dict[str, str], ends: Any, wanted: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    base, adapter = injured(tmp_path, WORDS, template, **special)
    rewritten(base / "generation_config.json", eos_token_id=ends)
    rewritten(base / "config.json", eos_token_id=ends)
    plan = plan_merge(base, adapter)
    out = tmp_path / "out"
    execute(plan, out)
    assert GenerationConfig.from_pretrained(out).eos_token_id == wanted
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.7  # what the base says stays
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == wanted
    assert [note for note in plan.notes if "generation stops" in note] == [] if wanted == ends else plan.notes
    if wanted == ends:
        same = [
            (out / name).read_bytes() == (base / name).read_bytes()
            for name in ("generation_config.json", "config.json")
        ]
        assert same == [True, "eos_token" not in special or special["eos_token"] == "</s>" or isinstance(ends, list)]
    assert "LT320" not in {finding.code for finding in validate(out).findings}
    rewritten(out / "generation_config.json", eos_token_id=ends)
    assert ("LT320" in {finding.code for finding in validate(out).findings}) is (wanted != ends)
    assert validate(base).findings == ()  # a base model ships with a template that it was not trained with


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.mark.parametrize(
    ("template", "special", "ends", "wanted"),
    [
        pytest.param(CHATML, SPECIAL, 1, [1, 4], id="Qwen's base, trained with its own template"),
        pytest.param(CHATML, {**SPECIAL, "eos_token": "<|im_end|>"}, [4, 1], [4, 1], id="Qwen, healthy"),
        pytest.param(LLAMA3, {**SPECIAL, "eos_token": "<|eot_id|>"}, [1, 5], [1, 5], id="Llama 3, healthy"),
        pytest.param(GEMMA, SPECIAL, [1, 6], [1, 6], id="Gemma, healthy"),
        pytest.param(MISTRAL, SPECIAL, 1, 1, id="Mistral, healthy"),
    ],
)
@pytest.mark.parametrize("beside", [(), ("chat_template.jinja",)], ids=["nothing", "the template"])
def test_what_lies_beside_the_base_ends_a_turn_where_the_adapter_has_no_tokenizer(
    template: str, special: dict[str, str], ends: Any, wanted: Any, beside: tuple[str, ...], tmp_path: Path
) -> None:
    base, adapter = injured(tmp_path, WORDS, template, **special)
    for name in TOKENIZER:
        shutil.copy(adapter / name, base / name)
    for path in [path for path in adapter.iterdir() if "adapter" not in path.name and path.name not in beside]:
        path.unlink()
    for name in ("generation_config.json", "config.json"):
        rewritten(base / name, eos_token_id=ends, pad_token_id=2, bos_token_id=0)
    plan = plan_merge(base, adapter)
    execute(plan, tmp_path / "out")
    held = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert held["eos_token_id"] == wanted
    assert any("generation stops" in note for note in plan.notes) is (wanted != ends)
    if wanted == ends:
        assert held == json.loads((base / "generation_config.json").read_text())
        assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert "LT320" not in {finding.code for finding in validate(tmp_path / "out").findings}


def test_without_a_tokenizer_anywhere_the_base_says_all(tmp_path: Path) -> None:
    base, adapter = injured(tmp_path, WORDS, CHATML, **SPECIAL)
    for path in [path for folder in (base, adapter) for path in folder.glob("*token*")]:
        path.unlink()
    execute(plan_merge(base, adapter), tmp_path / "out")
    for name in ("generation_config.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_without_a_generation_config_the_ends_are_in_the_config(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, adapter = injured(tmp_path, WORDS, CHATML, **SPECIAL)
    (base / "generation_config.json").unlink()
    execute(plan_merge(base, adapter), tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [1, 4]


def test_bos_and_pad_are_the_tokenizers(tmp_path: Path) -> None:
    base, adapter = injured(tmp_path, WORDS, MISTRAL, **{**SPECIAL, "bos_token": "<|im_start|>", "pad_token": "</s>"})
    execute(plan_merge(base, adapter), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        held = json.loads((tmp_path / "out" / name).read_text())
        assert (held["bos_token_id"], held["eos_token_id"], held["pad_token_id"]) == (3, 1, 1)

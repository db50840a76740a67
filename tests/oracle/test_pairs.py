"""`verify --pairs` and `ci --pairs`: rewards against those of transformers and PEFT, tokens against TRL's, and the gate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from lora_tool import verify
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.plans.merge.provenance import find_inputs
from lora_tool.rules.merged.pairs import PairEvidence, Ranking
from lora_tool.verification import rewards
from lora_tool.verification.pairs import read_pairs
from tests.cli.calling import FIXTURES, Caller
from tests.mutations import break_, copy_of
from tests.mutations.merged_models import PAIRS, SCORE, numbers, stored, weights
from tests.oracle.peft_merge import merge_with_ours, save_adapter, save_base

ADAPTER = "fixtures/reward-qwen2/adapter"
ROWS = [json.loads(line) for line in PAIRS.read_text().splitlines()]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.chdir(FIXTURES.parent)
    return Caller(capsys)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    return copy_of("reward-qwen2/merged", tmp_path)


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ranked(merged: Path, pairs: Path) -> PairEvidence:
    found = verify(merged, pairs=pairs).pairs
    assert found is not None
    return found


def ids_of(merged: Path, pairs: Path) -> list[list[int]]:
    inputs = find_inputs(merged)
    ranking = rewards._Ranking(inputs, inputs.plan(), read_pairs(pairs))
    return [ranking._ids[at].tolist() for at in ranking._at]


@pytest.mark.parametrize("rows", [ROWS[:3], ROWS[3:6], ROWS[6:9], ROWS[9:]], ids=["text", "messages", "whole", "texts"])
@pytest.mark.filterwarnings("default")
def test_tokens_are_those_that_trl_trains_on(merged: Path, tmp_path: Path, rows: list[Any]) -> None:
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(merged),
        args=RewardConfig(
            output_dir=str(tmp_path / "out"), max_length=None, use_cpu=True, bf16=False, report_to="none"
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(merged),
    )
    theirs = [ids for row in trainer.train_dataset for ids in (row["chosen_ids"], row["rejected_ids"])]
    assert ids_of(merged, written(tmp_path, *rows)) == theirs


def rewards_of(model: Any, texts: list[list[int]]) -> list[float]:
    with torch.no_grad():
        return [float(model.eval()(input_ids=torch.tensor([ids])).logits) for ids in texts]


def test_rewards_are_those_of_transformers_and_peft(merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_BATCH_TOKENS", 100)
    found = ranked(merged, PAIRS)
    assert (found.lines, found.cut, found.streamed) == (tuple(range(1, 13)), 0, True)
    assert found.unmerged is not None
    texts = ids_of(merged, PAIRS)
    base = AutoModelForSequenceClassification.from_pretrained(merged.parent / "base", num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = AutoModelForSequenceClassification.from_pretrained(merged).config.pad_token_id
    adapted = PeftModel.from_pretrained(base, merged.parent / "adapter")
    whole = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    for ranking, model in ((found.unmerged, adapted), (found.merged, whole)):
        theirs = rewards_of(model, texts)
        assert ranking.chosen == pytest.approx(theirs[::2], abs=1e-5)
        assert ranking.rejected == pytest.approx(theirs[1::2], abs=1e-5)
    apart = [abs(a - b) for a, b in zip(found.unmerged.chosen, found.merged.chosen, strict=True)]
    assert found.largest is not None
    assert found.largest >= max(apart) > 0


def test_a_model_without_pad_token_reads_its_last_token(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32, vocab_size=304)
    lora = {"r": 4, "target_modules": "all-linear"}
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", lora, num_labels=1)
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    with pytest.raises(UnsupportedAdapter, match="has a tokenizer that transformers can load"):
        verify(merged, pairs=PAIRS)
    AutoTokenizer.from_pretrained(FIXTURES / "reward-qwen2" / "base").save_pretrained(merged)
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    pairs = written(tmp_path, {"chosen": "ab", "rejected": "c"}, {"chosen": "d", "rejected": "d" * 30})
    found = ranked(merged, pairs)
    whole = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    theirs = rewards_of(whole, ids_of(merged, pairs))
    assert found.merged.chosen == pytest.approx(theirs[::2], abs=1e-5)
    assert found.merged.rejected == pytest.approx(theirs[1::2], abs=1e-5)


def test_the_pairs_whose_order_changed_are_named(call: Caller, merged: Path) -> None:
    with weights(merged) as table:
        table[SCORE] = stored(-numbers(table[SCORE]), table[SCORE])
    called = call("verify", merged, "--pairs", PAIRS, "--min-accuracy", "0.9")
    assert called.code == 5  # it is written wrong, and ranks wrong
    lines = [line.strip() for line in called.out.splitlines()]
    assert "12 pairs ordered differently: line 1, 2, 3, 4, 5, 6, 7, 8, …" in " ".join(lines)
    assert any(line.startswith("base + adapter accuracy 0.917 (95% 0.646 to 0.985)") for line in lines)
    assert any(line.startswith("merged         accuracy 0.083") for line in lines)


def test_ties_count_half_and_long_texts_lose_their_beginning(call: Caller, merged: Path, tmp_path: Path) -> None:
    rows = [{"chosen": "the same", "rejected": "the same"}, {"chosen": "ab " * 100, "rejected": "c" + "ab " * 99}]
    lines = call("verify", merged, "--pairs", written(tmp_path, *rows)).out
    assert "2 ties, counted half" in lines or "1 tie, counted half" in lines
    assert "2 texts cut to the last 128 tokens" in lines
    assert all(len(ids) <= 128 for ids in ids_of(merged, tmp_path / "rows.jsonl"))


def test_a_gate_below_which_verify_fails(call: Caller, merged: Path) -> None:
    asked = ("verify", merged, "--pairs", PAIRS, "--min-accuracy")
    assert call(*asked, "0.9").code == 0
    called = call(*asked, "0.95", "--json")
    assert called.code == 1
    (finding,) = called.json["findings"]
    assert finding["code"] == "LT625"
    assert "0.917 of the 12 pairs" in finding["message"]
    told = called.json["verification"]["pairs"]
    assert told["merged"]["accuracy"] == told["unmerged"]["accuracy"] == pytest.approx(11 / 12)
    assert (told["changed_lines"], told["min_accuracy"], len(told["merged"]["chosen"])) == ([], 0.95, 12)
    assert call(*asked, "0.95", "--ignore", "LT625").code == 0
    assert "LT625" in call(*asked, "0.95", "--format", "sarif").out


def test_the_margins_are_drawn(call: Caller, merged: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "margins.html", tmp_path / "margins.png"
    for drawn in (page, picture):
        called = call("verify", merged, "--pairs", PAIRS, "--plot", drawn)
        assert (called.code, called.err) == (0, f"drawn: {drawn}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "0.917 (95% 0.646 to 0.985)" in text
    assert all(name in text for name in (str(PAIRS), "base + adapter", "reward of chosen", "no pairs"))
    wrong: list[list[str | Path]] = [["--plot", picture], ["--pairs", PAIRS, "--plot", tmp_path / "a.gif"]]
    wrong.append(["--pairs", PAIRS, "--plot", tmp_path / "nowhere" / "a.png"])
    assert [call("verify", merged, *options).code for options in wrong] == [2, 2, 2]


def test_a_gate_below_which_ci_fails(call: Caller, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("ci", ADAPTER, "-o", out, "--rm", "--pairs", PAIRS, "--min-accuracy")
    called = call(*asked, "0.95")
    assert called.code == 1
    assert "0.917 of 12 pairs ranked right, base + adapter 0.917" in called.out
    assert "LT625" in called.out
    assert call(*asked, "0.9").code == 0
    assert "reused  verify" in call(*asked, "0.9").out
    # the same of a model that needs no merge
    assert call("ci", out, "--pairs", PAIRS, "--min-accuracy", "0.95").code == 1
    assert "nothing was merged; 0.917 of 12 pairs ranked right" in call("ci", out, "--pairs", PAIRS).out


def test_the_table_of_the_pipeline_takes_a_gate(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_bytes(PAIRS.read_bytes())
    table = tmp_path / "lora-tool.toml"
    table.write_text('[ci]\npairs = "pairs.jsonl"\nmin-accuracy = 0.95\n')
    assert call("ci", ADAPTER, "-o", tmp_path / "out", "--rm", "--config", table).code == 1
    table.write_text('[ci]\npairs = "pairs.jsonl"\nmin-accuracy = "much"\n')
    called = call("ci", ADAPTER, "-o", tmp_path / "out", "--rm", "--config", table)
    assert called.code == 2
    assert "expected a number, found 'much'" in called.err


def test_a_broken_merge_is_not_excused_by_its_rank(call: Caller, merged: Path) -> None:
    break_(merged, "LT606")
    assert call("verify", merged, "--pairs", PAIRS, "--min-accuracy", "1").code == 5


def test_what_gives_no_reward_is_refused_before_it_is_merged(call: Caller, tmp_path: Path) -> None:
    called = call("ci", "fixtures/causal-llama/adapter", "-o", tmp_path / "out", "--pairs", PAIRS)
    assert called.code == 3
    assert "is not a reward model" in called.out
    assert not (tmp_path / "out").exists()
    called = call("verify", copy_of("causal-llama/merged", tmp_path), "--pairs", PAIRS)
    assert called.code == 3
    assert "has no head" in called.err


MESSAGES = [{"role": "user", "content": "a"}]
WRONG = [
    (3, "found 3"),
    ({"prompt": "p", "completion": "c", "label": True}, "found the columns completion, label, prompt"),
    ({"chosen": "a", "rejected": None}, "both as texts or both as messages"),
    ({"chosen": "a", "rejected": MESSAGES}, "both as texts or both as messages"),
    ({"chosen": 3, "rejected": "b"}, "expected `chosen` as a text or as messages with a `role`; found 3"),
    ({"chosen": [], "rejected": MESSAGES}, "expected `chosen`"),
    ({"prompt": MESSAGES, "chosen": "a", "rejected": "b"}, "expected `prompt`"),
    ({"prompt": "elsewhere", "chosen": MESSAGES, "rejected": MESSAGES}, "no message of `chosen` and `rejected`"),
    ({"chosen": "a", "rejected": "b", "chat_template_kwargs": 1}, "expected `chat_template_kwargs` as an object"),
    ({"chosen": [{"role": "user"}], "rejected": MESSAGES}, None),
]


@pytest.mark.parametrize(("row", "said"), WRONG)
def test_a_wrong_row_is_one_error(call: Caller, merged: Path, tmp_path: Path, row: object, said: str | None) -> None:
    path = written(tmp_path, {"chosen": "a", "rejected": "b"}, row)
    called = call("verify", merged, "--pairs", path)
    if said is None:  # the template prints nothing in its place, as it does when it is trained on
        assert called.code == 0
        return
    assert called.code == 3
    assert f"{path}: `line 2`: " in called.err
    assert said in called.err
    assert called.err.count("error:") == 1


@pytest.mark.parametrize(("content", "said"), [("\n", "holds no pair"), ("{", "`line 1`: is not valid JSON")])
def test_a_file_without_pairs(call: Caller, merged: Path, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    called = call("verify", merged, "--pairs", path)
    assert called.code == 3
    assert said in called.err
    assert call("verify", merged, "--min-accuracy", "0.5").code == 2


def test_a_conversation_needs_a_template(call: Caller, merged: Path) -> None:
    (merged / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    called = call("verify", merged, "--pairs", PAIRS)
    assert called.code == 3
    assert f"{PAIRS}: `line 4`: the tokenizer does not take this pair: roles must alternate" in called.err


def test_the_interval_is_wilsons() -> None:
    def ranking(right: int, of: int) -> Ranking:
        return Ranking(chosen=(1.0,) * right + (0.0,) * (of - right), rejected=(0.5,) * of)

    assert ranking(7, 10).interval == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert ranking(0, 10).interval == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert ranking(10, 10).interval == pytest.approx((0.7225, 1.0), abs=1e-4)
    lost = Ranking(chosen=(math.nan, math.inf, 1.0), rejected=(0.0, 0.0, 0.0))
    assert (lost.without_number, lost.mean_margin) == (2, 1.0)
    assert lost.accuracy == pytest.approx(1 / 3)

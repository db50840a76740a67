"""A run's configuration: every option of TRL and accelerate, one block of ours, and typos that are named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lora_tool.errors import BadRunConfig
from lora_tool.train.checks import static_findings, with_settings
from lora_tool.train.config import RunConfig, read_run_config, trl_arguments
from lora_tool.train.job import TrainingJob, read_job, write_job
from lora_tool.train.methods import METHODS

REWARD = METHODS["reward"]


def read(tmp_path: Path, text: str, *typed: str, method: str = "reward") -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_run_config(METHODS[method], path, typed)


def test_every_flag_of_accelerate_is_one(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    flags = {action.option_strings[0] for action in parser._actions if action.nargs == 0}
    flags -= {"-h", "--help", "-m", "--module", "--no_python"}
    assert flags >= {"--cpu", "--multi_gpu", "--use_deepspeed", "--use_fsdp"}
    lines = "".join(f"    {flag[2:].replace('-', '_')}: true\n" for flag in sorted(flags))
    run = read(tmp_path, f"lora_tool:\n  launch:\n{lines}")
    assert {word.replace("-", "_") for word in run.launch} == {word.replace("-", "_") for word in flags}


@pytest.mark.parametrize(
    ("text", "typed", "wrong", "right"),
    [
        ("lora_rr: 8", (), "lora_rr", "lora_r"),
        ("learning_rat: 1", (), "learning_rat", "learning_rate"),
        ("", ("--max_stepz", "3"), "max_stepz", "max_steps"),
        ("num_proceses: 2", (), "num_proceses", "num_processes"),
        ("lora_tool: {gaurd: {}}", (), "gaurd", "guard"),
        ("lora_tool: {guard: {windw: 3}}", (), "windw", "window"),
        ("learning-rat: 1", (), "learning_rat", "learning_rate"),
        ("lora_tool: {after: {merg: {}}}", (), "merg", "merge"),
        ("lora_tool: {guard: {ignore: [colums]}}", (), "colums", "columns"),
        ("lora_tool: {launch: {multi_gpus: true}}", (), "multi_gpus", "multi_gpu"),
    ],
)
def test_a_typo_is_named_with_what_was_meant(
    tmp_path: Path, text: str, typed: tuple[str, ...], wrong: str, right: str
) -> None:
    with pytest.raises(BadRunConfig, match=wrong) as caught:
        read(tmp_path, text, *typed)
    assert re.search(rf"(?i)did you mean [`']{right}[`']\?", f"{caught.value} {caught.value.hint}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "not YAML"),
        ("use_peft: maybe", "use_peft.*maybe"),
        ("lora_tool: {guard: {mode: maybe}}", "none of stop, warn, off"),
        ("lora_tool: {guard: {window: 0}}", "window`: expected int of at least 1"),
        ("lora_tool: {after: {push: {private: true}}}", "needs `repo`"),
        ("lora_tool: [1]", "expected table"),
        ("accelerate_config: zero9", "zero9"),
        ("multi_gpu: perhaps", "expected true or false"),
        ("num_processes: many", "accelerate does not accept the options: .*many"),
        ("env: 3", "expected table"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadRunConfig, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRunConfig, match=r"No such file"):
        read_run_config(REWARD, tmp_path / "none.yaml", ())


@pytest.mark.parametrize("instead", ["/dev/zero", "fifo"])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, instead: str) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(BadRunConfig, match=r"regular|plain"):
        read_run_config(METHODS["reward"], path if instead == "fifo" else Path(instead), ())


@pytest.mark.parametrize("text", ["[" * 5000, "when: 2026-13-45"])
def test_yaml_that_python_cannot_hold_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadRunConfig, match=r"not YAML"):
        read(tmp_path, text)


def test_accelerates_flags_are_flags(tmp_path: Path) -> None:
    text = (
        "cpu: true\nmulti_gpu: false\nnum_processes: 2\nlora_tool: {launch: {mixed_precision: bf16, use_fsdp: 'yes'}}"
    )
    assert read(tmp_path, text).launch == [
        "--mixed_precision", "bf16", "--use_fsdp", "--cpu", "--num_processes", "2",
    ]  # fmt: skip


def test_presets_are_trls(tmp_path: Path) -> None:
    flag, path = read(tmp_path, "accelerate_config: zero3").launch
    assert flag == "--config_file"
    assert Path(path).name == "zero3.yaml"
    assert Path(path).is_file()


@pytest.mark.filterwarnings("default")
def test_what_is_typed_wins_and_reaches_trls_parser_as_text(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        "learning-rate: 1e-4\nmax_steps: 3\nenv: {A: 1}\nuse_cpu: true\nbf16: false",
        *(
            "--learning-rate",
            "1e-5",
            "--lora_target_modules",
            "q_proj",
            "v_proj",
            "--use_peft",
            "--no_gradient_checkpointing",
        ),
        *("--num_processes=4", "--multi_gpu"),
    )
    assert run.options["learning_rate"] == 1e-5
    assert run.options["lora_target_modules"] == ["q_proj", "v_proj"]
    assert (run.options["use_peft"], run.options["gradient_checkpointing"], run.options["max_steps"]) == (
        True,
        False,
        3,
    )
    assert run.given >= {"learning_rate", "max_steps", "use_peft", "gradient_checkpointing"}
    assert "warmup_steps" not in run.given
    assert run.launch == ["--num_processes", "4", "--multi_gpu"]
    _, training, model, _ = trl_arguments(run.method, run.options)  # as the worker reads them
    assert (training.learning_rate, training.max_steps, training.gradient_checkpointing) == (1e-5, 3, False)
    assert model.lora_target_modules == ["q_proj", "v_proj"]
    assert run.env == {"A": "1"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("method", METHODS)
def test_every_option_reaches_the_worker_as_it_was_read(tmp_path: Path, method: str) -> None:
    text = "learning_rate: 1e-4\nuse_peft: true\ndatasets: [{path: json, data_files: a.jsonl}]\n"
    run = read(tmp_path, text, "--use_cpu", "--bf16", "false", "--output_dir", "out", method=method)
    write_job(TrainingJob(guard=run.guard, method=run.method, options=run.options), tmp_path)
    options = read_job(tmp_path).options
    assert options == run.options
    _, training, model, mixture = trl_arguments(run.method, options)
    assert (training.learning_rate, model.use_peft, mixture.datasets[0].data_files) == (1e-4, True, "a.jsonl")


@pytest.mark.parametrize("typed", [("stray",), ("--learning_rate",), ("--", "x")])
def test_arguments_that_are_no_options(tmp_path: Path, typed: tuple[str, ...]) -> None:
    with pytest.raises(BadRunConfig):
        read(tmp_path, "", *typed)


def test_only_what_is_absent_is_set(tmp_path: Path) -> None:
    run, settings = with_settings(read(tmp_path, "use_peft: true"))
    assert {name: value for name, (value, _) in settings.items()} == {
        "lora_task_type": "SEQ_CLS",
        "logging_nan_inf_filter": False,
    }
    assert run.options["lora_task_type"] == "SEQ_CLS"
    _, none = with_settings(read(tmp_path, "use_peft: true\nlora_task_type: CAUSAL_LM\nlogging_nan_inf_filter: true"))
    assert none == {}
    _, causal = with_settings(read(tmp_path, "use_peft: true", method="sft"))
    assert list(causal) == ["logging_nan_inf_filter"]


@pytest.mark.parametrize(
    ("method", "text", "codes"),
    [
        ("reward", "use_peft: true\nlora_task_type: SEQ_CLS\ndtype: bfloat16", set()),
        ("reward", "use_peft: true\nlora_task_type: null", {"task-type"}),
        ("sft", "use_peft: true\nlora_task_type: SEQ_CLS", {"task-type"}),
        ("sft", "use_peft: false\nlora_task_type: SEQ_CLS", set()),
        ("reward", "dtype: float16", {"fp16-weights"}),
        ("reward", "model_init_kwargs: {dtype: float16}", {"fp16-weights"}),
        ("reward", "dtype: bfloat16\nmodel_init_kwargs: {dtype: float16}", {"fp16-weights", "dtype-conflict"}),
        ("reward", "fp16: true\nmax_grad_norm: 0", {"no-clipping"}),
        ("reward", "fp16: true\nmax_grad_norm: 1", set()),
        ("reward", "logging_nan_inf_filter: true", {"nan-filter"}),
        ("dpo", "padding_free: true", {"padding-free-off"}),
        ("sft", "packing: true\npacking_strategy: wrapped", {"packing-wrapped"}),
        ("sft", "packing: true", set()),
    ],
)
def test_what_the_options_tell(tmp_path: Path, method: str, text: str, codes: set[str]) -> None:
    found = static_findings(read(tmp_path, text, method=method))
    assert {item.code for item in found} == codes
    assert all(item.hint for item in found)

"""A run's configuration: every option of TRL and accelerate, one block of ours, and typos that are named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lora_tool_train.checks import require_inputs, static_findings, with_task_type
from lora_tool_train.config import RunConfig, read_run_config, trl_parser
from lora_tool_train.foreign import INSTEAD, NAMES, meant_by
from lora_tool_train.init_command import first_run
from lora_tool_train.methods import METHODS
from lora_tool_train.results import ResumeChoice
from lora_tool_train.running import launch_command
from lora_tool_train.traps import BadRunConfig, as_typed
from tests.cli.calling import Caller


def read(tmp_path: Path, text: str, *typed: str, method: str = "reward") -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_run_config(METHODS[method], path, typed)


def test_every_flag_of_accelerate_is_one(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    flags = {action.option_strings[0] for action in parser._actions if action.nargs == 0}
    flags -= {"-h", "--help", "-m", "--module", "--no_python", "--debug"}  # the last is TRL's, too
    assert flags >= {"--cpu", "--multi_gpu", "--use_deepspeed", "--use_fsdp"}
    run = read(tmp_path, "".join(f"{flag[2:].replace('-', '_')}: true\n" for flag in sorted(flags)))
    assert {word.replace("-", "_") for word in run.launch} == {word.replace("-", "_") for word in flags}


@pytest.mark.parametrize(
    ("text", "typed", "wrong", "right"),
    [
        ("lora_rr: 8", (), "lora_rr", "lora_r"),
        ("learning_rat: 1", (), "learning_rat", "learning_rate"),
        ("", ("--max_stepz", "3"), "max_stepz", "max_steps"),
        ("torch_dtype: auto", (), "torch_dtype", "dtype"),
        ("", ("--lora_rank", "8"), "lora_rank", "lora_r"),
        ("num_proceses: 2", (), "num_proceses", "num_processes"),
        ("lora_tool: {gaurd: {}}", (), "gaurd", "guard"),
        ("lora_tool: {guard: {windw: 3}}", (), "windw", "window"),
        ("learning-rat: 1", (), "learning_rat", "learning_rate"),
        ("lr_scheduler_type: cosinus", (), "lr_scheduler_type` is cosinus", "cosine"),
        ("save_strategy: steps", ("--eval_strategy", "epochs"), "eval_strategy.* 'epochs'", "epoch"),
        ("optim: adamw_toch", (), "run.yaml: `optim` is adamw_toch", "adamw_torch"),
        ("lora_tool: {guard: {ignore: [no-margn]}}", (), "no-margn", "no-margin"),
    ],
)
def test_a_typo_is_named_with_what_was_meant(
    tmp_path: Path, text: str, typed: tuple[str, ...], wrong: str, right: str
) -> None:
    with pytest.raises(BadRunConfig, match=wrong) as caught:
        read(tmp_path, text, *typed)
    assert re.search(rf"(?i)did you mean [`']{right}[`']\?", f"{caught.value} {caught.value.hint}")


def test_every_value_that_transformers_has_is_taken(tmp_path: Path) -> None:
    text = "lr_scheduler_type: warmup_stable_decay\noptim: paged_adamw_8bit\nsave_strategy: best\neval_strategy: no\n"
    assert read(tmp_path, text).given >= {"lr_scheduler_type", "optim", "save_strategy", "eval_strategy"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "not YAML"),
        ("use_peft: maybe", "use_peft.*maybe"),
        ("lora_tool: {guard: {mode: maybe}}", "none of stop, warn, off"),
        ("lora_tool: {guard: {window: 0}}", "window`: expected int of at least 1"),
        ("lora_tool: [1]", "expected table"),
        ("accelerate_config: zero9", "zero9"),
        ("seed: 1\nlora_r: 8\nseed: 2", "run.yaml: `seed` is given twice"),
        ("lora_tool: {guard: {window: 1, window: 2}}", "`window` is given twice"),
        ("multi_gpu: perhaps", "expected true or false"),
        ("num_processes: many", "accelerate does not accept the options: .*many"),
        ("env: 3", "expected table"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadRunConfig, match=message):
        read(tmp_path, text)


@pytest.mark.filterwarnings("default")
def test_names_from_elsewhere_lead_to_options_that_there_are() -> None:
    options = {action.dest for method in ("sft", "grpo") for action in trl_parser(METHODS[method])._actions}
    assert {*NAMES.values()} <= options
    assert not options & (NAMES.keys() | INSTEAD.keys())
    for name, written in INSTEAD.items():
        option = written.partition(":")[0]
        assert option in options | {"env"} or " " in option or option == "nothing", name
    assert meant_by("max_seq_length", {"lr"}) is None  # grpo has no max_length


def test_the_place_is_that_of_what_was_given(tmp_path: Path) -> None:
    text = "use_peft: true\nlora_task_type: CAUSAL_LM"
    (found,) = static_findings(read(tmp_path, text))
    assert found.path == str(tmp_path / "run.yaml")
    (found,) = static_findings(read(tmp_path, text, "--lora_task_type", "CAUSAL_LM"))
    assert found.path == "command line"


@pytest.mark.parametrize(
    ("hint", "typed", "said"),
    [
        ("lora_task_type: SEQ_CLS", {"lora_task_type"}, "--lora_task_type SEQ_CLS"),
        ("lora_r: 8, lora_alpha: 16", {"lora_alpha"}, "lora_r: 8, --lora_alpha 16"),
        ("lora_target_modules: [q_proj, v_proj]", {"lora_target_modules"}, "--lora_target_modules q_proj v_proj"),
        ("use_cpu: true and bf16: false", set(), "use_cpu: true and bf16: false"),
        (None, {"lora_r"}, None),
    ],
)
def test_what_was_typed_is_mended_where_it_was_typed(hint: str | None, typed: set[str], said: str | None) -> None:
    assert as_typed(hint, typed) == said


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
    assert run.env == {"A": "1"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("method", METHODS)
def test_every_option_reaches_trls_script_as_it_was_read(tmp_path: Path, method: str) -> None:
    text = "learning_rate: 1e-4\nuse_peft: true\ndatasets: [{path: json, data_files: a.jsonl}]\n"
    typed = ("--use_cpu", "--bf16", "false", "--output_dir", "out", "--lora_target_modules", "q_proj", "v_proj")
    run = read(tmp_path, text, *typed, "--num_processes", "1", method=method)
    words = launch_command(run, ResumeChoice(path=tmp_path), tmp_path)
    assert words[3:8] == ["--quiet", "--num_processes", "1", "-m", run.method.script]
    _, training, model, mixture = trl_parser(run.method).parse_args_and_config(words[-2:])
    assert (training.learning_rate, training.bf16, training.resume_from_checkpoint) == (1e-4, False, str(tmp_path))
    assert (model.use_peft, model.lora_target_modules) == (True, ["q_proj", "v_proj"])
    assert mixture.datasets[0].data_files == "a.jsonl"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", METHODS)
def test_what_init_prints_is_a_run_of_the_method(name: str, tmp_path: Path) -> None:
    text = first_run(METHODS[name]).replace("# use_cpu: true #", "use_cpu: true #").replace("bf16: true", "bf16: false")
    run = read(tmp_path, text.replace("# reward_funcs:", "reward_funcs:").replace("# num_pro", "num_pro"), method=name)
    require_inputs(run)
    assert not list(static_findings(run))
    assert with_task_type(run) is run
    launch_command(run, ResumeChoice(), tmp_path)
    trl_parser(run.method).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])


def test_the_help_of_a_method_has_its_options(call: Caller) -> None:
    shown = call("train", "cpo", "--help").out
    own, others = shown.partition("TRL options of cpo:")[2].split("Options of every method:")
    assert re.search(r"--cpo_alpha 1\.0 +Weight of the BC regularizer", own)
    assert "--learning_rate 1e-06" in others
    assert "TRL options" not in call("train", "--help").out


@pytest.mark.parametrize("typed", [("stray",), ("--learning_rate",), ("--", "x")])
def test_arguments_that_are_no_options(tmp_path: Path, typed: tuple[str, ...]) -> None:
    with pytest.raises(BadRunConfig):
        read(tmp_path, "", *typed)


@pytest.mark.parametrize(
    ("method", "text", "codes"),
    [
        ("reward", "use_peft: true\nlora_task_type: SEQ_CLS", set()),
        ("reward", "use_peft: true", set()),
        ("reward", "use_peft: true\nlora_task_type: null", {"task-type"}),
        ("sft", "use_peft: true\nlora_task_type: SEQ_CLS", {"task-type", "learning-rate"}),  # TRL's 2e-5
        ("sft", "use_peft: true\nlearning_rate: 2e-5", set()),
        ("sft", "use_peft: false\nlora_task_type: SEQ_CLS", set()),
        ("sft", "lora_r: 8", {"peft-off"}),
    ],
)
def test_the_checks_of_the_options(tmp_path: Path, method: str, text: str, codes: set[str]) -> None:
    found = list(static_findings(with_task_type(read(tmp_path, text, method=method))))
    assert {item.code for item in found} == codes
    assert all(item.hint for item in found)

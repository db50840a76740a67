"""The commented run.yaml that `lora-tool init` prints: a whole run of a method, from which a user's own is made."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.train.methods import Feedback, Method

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_REWARD_MODEL = "trl-lib/Qwen2-0.5B-Reward"
_DATA = {
    "sft": "trl-lib/Capybara",
    "kto": "trl-lib/kto-mix-14k",
    "grpo": "trl-lib/ultrafeedback-prompt",
    "rloo": "trl-lib/ultrafeedback-prompt",
}
_PAIRS = "trl-lib/ultrafeedback_binarized"
_RATES = {"reward": "1.0e-4", "sft": "2.0e-4", "grpo": "1.0e-5", "rloo": "1.0e-5"}
_RATE = "5.0e-6"
"""TRL's rate for LoRA where a method compares answers: a tenth of what sft takes to learn them."""
_BETA = {"orpo": "weight of the preference beside the loss of chosen", "cpo": "scale of the margin in the loss"}
_WIDTH = 48
"""Column at which comments begin."""
_METRIC = {
    Feedback.TEXT: "loss and mean_token_accuracy",
    Feedback.PREFERENCE: "accuracy and margin of chosen over rejected",
    Feedback.LABEL: "rewards of wanted and unwanted answers",
    Feedback.REWARD: "reward and its deviation; a loss near 0 is normal here",
}


def first_run(method: Method, *, cpu: bool = False) -> str:
    """Return YAML that trains an adapter by `method` as it stands, with what each key means and how it goes wrong.

    Model and data are small public ones of the Hub. With `cpu` it is a run of twenty short steps without a GPU.
    """
    blocks = (
        _head(method, cpu=cpu),
        _inputs(method),
        _adapter(method),
        _training(method, cpu=cpu),
        _ours(method, cpu=cpu),
    )
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _line(entry: str, comment: str = "") -> str:
    return f"{entry:<{_WIDTH - 1}} # {comment}" if comment else entry


def _head(method: Method, *, cpu: bool) -> Iterator[str]:
    yield f"# lora-tool train {method.name} --config run.yaml --dry-run    builds everything, takes no step"
    yield f"# lora-tool train {method.name} --config run.yaml              trains{' twenty short steps' if cpu else ''}"
    options = "TRL's config classes" if method.experimental else f"`trl {method.name} --help`"
    yield f"# Keys are the options of {options} and of `accelerate launch`; typed ones win: --learning_rate 1e-5"


def _inputs(method: Method) -> Iterator[str]:
    yield _line(f"model_name_or_path: {_MODEL}", "a folder or Hub id; merge an adapter before you train on it")
    if method.feedback is Feedback.REWARD:
        yield _line(
            f"reward_model_name_or_path: {_REWARD_MODEL}", "scores the answers; `lora-tool merge --rm` makes one"
        )
        yield _line("# reward_funcs: [my_rewards.score]", "or score() of ./my_rewards.py; it must tell answers apart")
    yield f"# it needs the columns {', or '.join(' + '.join(names) for names in method.columns)}"
    yield "# texts are taken as they are; messages, lists of role and content, go through the tokenizer's chat template"
    yield _line(f"dataset_name: {_DATA.get(method.name, _PAIRS)}", "a Hub id, or a folder of .jsonl, .csv or .parquet")
    yield _line("# datasets: [{path: json, data_files: my.jsonl}]", "instead of dataset_name: one file")
    yield _line(f"output_dir: {method.name}-adapter", "one for each run")


def _adapter(method: Method) -> Iterator[str]:
    yield _line("use_peft: true", "without it every lora_ key is ignored and the whole model trained")
    yield _line("lora_r: 16", "rank")
    yield _line("lora_alpha: 32", "ΔW = alpha / r · B A: twice the rank is usual")
    yield _line("lora_dropout: 0.05")
    yield _line("lora_target_modules: all-linear", "PEFT's own default is q_proj and v_proj for most models")
    if method.task_type == "SEQ_CLS":
        yield _line("lora_task_type: SEQ_CLS", "with CAUSAL_LM, TRL's default, the score head is not saved")


def _training(method: Method, *, cpu: bool) -> Iterator[str]:
    grouped = method.feedback is Feedback.REWARD
    rows = 4 if grouped and cpu else 2 if cpu else 8
    yield _line(
        f"learning_rate: {_RATES.get(method.name, _RATE)}", "LoRA takes about ten times what full training takes"
    )
    if cpu:
        yield _line("max_steps: 20", "a first look; for a full run: num_train_epochs: 1")
    else:
        yield _line("num_train_epochs: 1")
    yield _line(f"per_device_train_batch_size: {rows}", "out of memory: halve it and double the next")
    yield _line(f"gradient_accumulation_steps: {1 if cpu else 2}", "batch = this × the line above × processes")
    yield from _of_method(method, cpu=cpu)
    if cpu:
        yield _line("use_cpu: true")
        yield _line("bf16: false", "TRL's default true is refused or slow on a CPU")
    else:
        yield _line("bf16: true", "needs Ampere or newer; before that false, not fp16: it overflows above 65504")
        yield _line("gradient_checkpointing: true", "a fifth slower, far less memory")
    yield _line("dtype: float32", "of the base; bfloat16 halves it and rounds a trained head; never float16")
    yield _line("warmup_steps: 0.1", "below 1: a share of all steps")
    yield _line(f"logging_steps: {1 if cpu else 10}", f"look at {_METRIC[method.feedback]}")
    yield _line(f"save_steps: {10 if cpu else 200}", "`--resume auto` continues from the last complete checkpoint")
    yield _line("save_total_limit: 2")
    yield _line("report_to: none", "or wandb, trackio, tensorboard; metrics.jsonl is written anyway")
    yield _line("seed: 42")


def _of_method(method: Method, *, cpu: bool) -> Iterator[str]:
    if method.feedback is Feedback.REWARD:
        yield _line(f"num_generations: {4 if cpu else 8}", "answers per prompt; must divide the batch")
        yield _line(f"max_completion_length: {32 if cpu else 256}", "if every answer is cut here, raise it")
        yield _line("temperature: 1.0", "lower: similar answers, equal rewards, no gradient")
    else:
        longer = "tokens; longer rows are " + ("dropped" if method.name == "reward" else "cut at the end")
        yield _line(f"max_length: {512 if cpu else 1024}", longer)
    if method.name == "sft":
        yield _line("packing: false", "true fills rows with several texts; without flash attention they see each other")
    elif method.feedback is not Feedback.REWARD and method.name != "reward":
        yield _line("beta: 0.1", _BETA.get(method.name, "higher stays closer to the base"))


def _ours(method: Method, *, cpu: bool) -> Iterator[str]:
    yield _line("lora_tool:", "read by lora-tool; without this block the file also works with `trl`")
    yield _line("  guard: {mode: stop, window: 10}", "stop after so many steps without a signal; or mode: warn")
    if cpu:
        yield _line("  launch: {cpu: true, num_processes: 1}", "of `accelerate launch`")
    else:
        yield _line(
            "  # launch: {num_processes: 2}", "of `accelerate launch`; accelerate_config: zero3 is TRL's preset"
        )
    yield _line("  after:", "after a successful run")
    yield _line("    validate: true")
    model = f"{method.name}-model"
    yield _line(f"    # merge: {{output: {model}}}", "merged and verified beside the adapter")
    yield _line(f"    # push: {{repo: me/{model}, private: true}}")

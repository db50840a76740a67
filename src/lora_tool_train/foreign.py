"""Names of options in older releases and other trainers: what resembles them among TRL's is often something else."""

from __future__ import annotations

from collections.abc import Collection

NAMES = {
    "base_model": "model_name_or_path",
    "batch_size": "per_device_train_batch_size",
    "cutoff_len": "max_length",
    "dataset": "dataset_name",
    "epochs": "num_train_epochs",
    "evaluation_strategy": "eval_strategy",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "max_seq_length": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "modules_to_save": "lora_modules_to_save",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "pref_beta": "beta",
    "reward_model": "reward_model_name_or_path",
    "sample_packing": "packing",
    "seq_length": "max_length",
    "sequence_len": "max_length",
    "target_modules": "lora_target_modules",
    "task_type": "lora_task_type",
    "torch_dtype": "dtype",
    "use_liger": "use_liger_kernel",
    "use_lora": "use_peft",
}
"""Name elsewhere → TRL's, which takes the same value."""

INSTEAD = {
    "adapter": "use_peft: true",
    "finetuning_type": "use_peft: true",
    "flash_attention": "attn_implementation: flash_attention_2",
    "flash_attn": "attn_implementation: flash_attention_2",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "logging_dir": "env: {TENSORBOARD_LOGGING_DIR: FOLDER}",
    "lora_target_linear": "lora_target_modules: all-linear",
    "max_prompt_length": "max_length: N, which counts prompt and answer",
    "no_cuda": "use_cpu: true",
    "overwrite_output_dir": "nothing: earlier weights in output_dir are moved to superseded/",
    "quantization_bit": "load_in_4bit: true",
    "save_safetensors": "nothing: it is always so",
    "stage": "the method after `lora-tool train`",
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "use_unsloth": "nothing; or run a script of Unsloth's under `lora-tool guard -- python SCRIPT`",
    "val_set_size": "test_split_size: 0.1, and eval_strategy: steps",
    "warmup_ratio": "warmup_steps: 0.1 (a number below 1 is a share of the steps)",
}
"""Name elsewhere → what is written instead."""


def meant_by(name: str, known: Collection[str]) -> str | None:
    """Return what is written instead of the option `name`, None of a name that is not a known one from elsewhere."""
    if NAMES.get(name) in known:
        return f"did you mean `{NAMES[name]}`?"
    return f"write instead: {INSTEAD[name]}" if name in INSTEAD else None

"""Run by a Python that has xllamacpp: answers as `run_vllm.py` does, with model and adapters as GGUF or as transformers'.

The latter are converted, by llama.cpp's own scripts on the path. Every file is made and every question asked in a process
of its own, because the runner ends the process on an error; all are forks of one that has imported what converts.
`values` lack a constant, and that of the token FORCED is none.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xllamacpp as runner

FORCED = 40  # an ASCII character: the runner has no probabilities for a part of one


def in_a_fork(work: Callable[[Path], object]) -> tuple[bool, str]:
    """Return whether `work` ended well in a process of its own, and what it wrote into its file, or said."""
    with tempfile.TemporaryDirectory() as folder:
        answer, said = Path(folder, "answer"), Path(folder, "said")
        child = os.fork()
        if child == 0:
            with said.open("wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            try:
                work(answer)
            except BaseException as error:  # noqa: BLE001 - whatever it says is the answer
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return True, answer.read_text() if answer.exists() else ""
        return False, f"{code}: {said.read_text(errors='replace')[-600:]}"


def of_base(folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the model's config, and llama.cpp's class that converts it."""
    import convert_lora_to_gguf  # noqa: F401 - what it imports is needed by `write_adapter`
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config = ModelBase.load_hparams(folder, is_mistral_format=False)
    return config, get_model_class(get_model_architecture(config, ModelType.TEXT))


def write_base(folder: Path, out: Path) -> None:
    """Write the model as GGUF by llama.cpp's own class for it, with a vocabulary of single characters."""
    import gguf
    import torch

    config, known = of_base(folder)

    class Tiny(known):  # type: ignore[misc, valid-type]
        model_arch = known.model_arch

        def set_vocab(self) -> None:
            writer, count = self.gguf_writer, config["vocab_size"]
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list([chr(33 + at) if at < 94 else f"z{at}" for at in range(count)])
            writer.add_token_types([1] * count)
            writer.add_token_merges(["z z"])
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
            writer.add_add_bos_token(value=False)

    with torch.inference_mode():
        Tiny(folder, gguf.LlamaFileType.ALL_F32, out, hparams=config).write()


def write_adapter(base: Path, adapter: Path, out: Path) -> None:
    """Write the adapter as GGUF, as `convert_lora_to_gguf.py --base BASE --outtype f32 --outfile OUT ADAPTER` does."""
    import convert_lora_to_gguf as converter

    sys.argv[1:] = ["--base", str(base), "--outtype", "f32", "--outfile", str(out), str(adapter)]
    runpy.run_path(str(converter.__file__), run_name="__main__")


def values(model: Path, adapter: Path | None, prompts: list[list[int]], vocabulary: int) -> list[list[float]]:
    """Return the log probability of every token after each prompt."""
    params = runner.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(model), 64, 1
    params.warmup = params.fit_params = False
    params.cpuparams.n_threads = 1
    params.flash_attn_type = runner.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = runner.ggml_type.GGML_TYPE_F32
    params.lora_adapters = [] if adapter is None else [runner.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = runner.Server(params)
    asked = {"n_predict": 1, "n_probs": vocabulary, "logit_bias": [[FORCED, 1000]], "post_sampling_probs": False}
    asked |= {"temperature": 0, "cache_prompt": False}
    return [_of(server.handle_completions(asked | {"prompt": prompt}), vocabulary) for prompt in prompts]


def ask(before: Callable[[], None] | None, model: Path, adapter: Path | None, job: dict[str, Any], out: Path) -> None:
    """Do what is to be done `before`, if anything, and write the values into a file."""
    if before is not None:
        before()
    out.write_text(json.dumps(values(model, adapter, job["prompts"], job["vocabulary"])))


def _of(answer: Any, vocabulary: int) -> list[float]:
    told = json.loads(answer) if isinstance(answer, str) else answer
    (first,) = told["choices"][0]["logprobs"]["content"]
    found = {each["id"]: each["logprob"] for each in first["top_logprobs"]}
    return [found[token] for token in range(vocabulary)]


def answers(job: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    given = Path(job["model"])
    converts = given.suffix != ".gguf"
    model = folder / "base.gguf" if converts else given
    if converts:
        of_base(given)  # imports for seconds, which no fork repeats

    for name, source in {"": "", **job["adapters"]}.items():
        if not name:
            before = partial(write_base, given, model) if converts else None
            lora = None
        else:
            lora = Path(source) if source.endswith(".gguf") else folder / "lora.gguf"
            before = None if source.endswith(".gguf") else partial(write_adapter, given, Path(source), lora)
        well, told = in_a_fork(partial(ask, before, model, lora, job))
        yield {"name": name, "values": json.loads(told)} if well else {"name": name, "error": told}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder, Path(sys.argv[2]).open("w") as out:
        for answer in answers(job, Path(folder)):
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main()

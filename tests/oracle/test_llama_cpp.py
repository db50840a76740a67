"""What llama.cpp computes with a prepared adapter, against PEFT's log probabilities: the base by its converters, both in its runner.

Runs where `xllamacpp` is installed and LLAMA_CPP names a folder of llama.cpp's sources; CONTRIBUTING.md has the versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from lora_tool import prepare, validate
from lora_tool.rules.engine.subjects import Server
from tests.oracle.peft_merge import load_model
from tests.oracle.test_combine import EMBEDDINGS, QV, adapters_of
from tests.oracle.test_convert_experts import FUSED
from tests.oracle.test_prepare import MIXED

SOURCES = Path(os.environ.get("LLAMA_CPP", ""))
TOKENS = [5, 17, 3, 42, 8]
FORCED = 40  # an ASCII character: the runner has no probabilities for a part of one

BASE = """
import sys; from pathlib import Path
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
folder, out = map(Path, sys.argv[1:])
config = ModelBase.load_hparams(folder, False)
known = get_model_class(get_model_architecture(config, ModelType.TEXT))
class Tiny(known):
    model_arch = known.model_arch
    def set_vocab(self):
        writer, count = self.gguf_writer, config["vocab_size"]
        writer.add_tokenizer_model("gpt2"); writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([chr(33 + at) if at < 94 else f"z{at}" for at in range(count)])
        writer.add_token_types([1] * count); writer.add_token_merges(["z z"])
        writer.add_bos_token_id(1); writer.add_eos_token_id(2); writer.add_add_bos_token(False)
with torch.inference_mode():
    Tiny(folder, gguf.LlamaFileType.ALL_F32, out, hparams=config).write()
"""
RUN = """
import json, sys
import xllamacpp as runner
params = runner.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.fit_params, params.n_parallel = sys.argv[1], 64, False, False, 1
params.cpuparams.n_threads = 1
params.flash_attn_type = runner.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = runner.ggml_type.GGML_TYPE_F32
params.lora_adapters = [runner.CommonAdapterLoraInfo(sys.argv[2], 1.0)]
tokens, forced, count = json.loads(sys.argv[4])
asked = {"prompt": tokens, "n_predict": 1, "n_probs": count, "logit_bias": [[forced, 1000]], "post_sampling_probs": False}
answer = runner.Server(params).handle_completions(asked | {"temperature": 0, "cache_prompt": False})
open(sys.argv[3], "w").write(answer if isinstance(answer, str) else json.dumps(answer))
"""


def ran(*args: str | Path) -> None:
    """Run Python in a process of its own, as the runner ends the process on an error."""
    paths = os.pathsep.join(map(str, (SOURCES / "gguf-py", SOURCES)))
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def of_llama_cpp(base: Path, adapter: Path, out: Path) -> torch.Tensor:
    """Return the log probability of each token after TOKENS, up to one constant for all."""
    count = json.loads((base / "config.json").read_text())["vocab_size"]
    model, answer = out / "base.gguf", out / "answer.json"
    ran("-c", BASE, base, model)
    ran("-c", RUN, model, adapter / "adapter.gguf", answer, json.dumps([TOKENS, FORCED, count]))
    (told,) = json.loads(answer.read_text())["choices"][0]["logprobs"]["content"]
    found = {each["id"]: each["logprob"] for each in told["top_logprobs"]}
    return torch.tensor([found[token] for token in range(count) if token != FORCED], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore")  # of PEFT, about fused experts
@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("llama", MIXED),
        ("qwen3", MIXED),
        ("llama", EMBEDDINGS),
        ("llama", QV | {"trainable_token_indices": {"embed_tokens": [3, 5]}}),
        ("mixtral", FUSED),
    ],
)
def test_llama_cpp_gives_pefts_log_probabilities(model_type: str, lora: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    if not (SOURCES / "convert_lora_to_gguf.py").is_file():
        pytest.skip("LLAMA_CPP does not name a folder of llama.cpp's sources")
    base, (adapter,) = adapters_of(tmp_path, model_type, lora)
    with torch.no_grad():
        model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)
        logits = model(torch.tensor([TOKENS])).logits[0, -1].double()
    out = prepare(adapter, Server.LLAMA_CPP, base=base, out=tmp_path / "out").path
    assert not [each for each in validate(out, base=base, servers=[Server.LLAMA_CPP]).findings if "LT8" in each.code]
    found = of_llama_cpp(base, out, tmp_path)
    expected = torch.cat([logits[:FORCED], logits[FORCED + 1 :]])
    assert torch.allclose(found - found.mean(), expected - expected.mean(), rtol=0, atol=2e-4)

"""All families of rules: importing one registers its rules."""

from lora_tool.rules.adapter import (
    lt2_config,
    lt2_layers,
    lt2_names,
    lt2_targets,
    lt2_weights,
    lt3_head,
    lt5_base,
    lt5_hazards,
    lt5_model,
    lt5_other_base,
    lt5_several,
)
from lora_tool.rules.files import lt1_containers
from lora_tool.rules.merged import lt6_base, lt6_headers, lt6_values
from lora_tool.rules.model import lt3_functions, lt3_model_ends, lt3_tensors, lt3_tokenizers
from lora_tool.rules.serving import lt8_beside, lt8_form, lt8_models, lt8_names, lt8_paths, lt8_scores, lt8_served
from lora_tool.rules.training import lt4_contents, lt4_rank_files, lt4_values, lt7_run

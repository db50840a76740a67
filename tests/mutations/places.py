"""The tensors that injuries of adapters are done to. A test that injures an adapter of another model names its own."""

from tests.checkpoint_edits import PREFIX

Q_PROJ = f"{PREFIX}model.layers.0.self_attn.q_proj"
DOWN_PROJ = f"{PREFIX}model.layers.0.mlp.down_proj"
SCORE = f"{PREFIX}score.weight"

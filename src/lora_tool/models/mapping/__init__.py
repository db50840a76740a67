"""Where the parameters of a model in memory lie on disk, as transformers itself maps them, as plain data.

`WeightMapping` builds the model's class without weights and replays, on names and row numbers, what `from_pretrained`
and `save_pretrained` do with a checkpoint's tensors; `MixtureMapping` says the same of some mixtures of experts by a
table. transformers is imported only in this package, and only when a merge needs its answer.
"""

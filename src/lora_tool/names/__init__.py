"""Where the parameters of a model in memory are on disk: transformers' own answer, as plain data.

`WeightMapping` builds the model's class without weights and replays, on names and row numbers, what `from_pretrained` and
`save_pretrained` do with a checkpoint's tensors. transformers is imported here alone, and only when it is asked.
"""

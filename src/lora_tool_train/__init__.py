"""Training through TRL with guards: the commands `train`, `guard` and `init`, which enter lora-tool by entry points.

`train` checks a config, runs TRL's own script under the guard, and judges what was left; `guard` does the last two
around any command. The guard is a callback of the HF Trainer that `attach/sitecustomize.py` puts into each process.
"""

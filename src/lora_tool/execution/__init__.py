"""The only writer and the only arithmetic: a plan becomes a folder."""

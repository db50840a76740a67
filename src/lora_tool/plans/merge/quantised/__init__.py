"""Bases with quantised weights: a merge of any other base imports none of this."""

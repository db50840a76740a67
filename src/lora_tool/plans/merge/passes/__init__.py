"""The passes of a merge: one module each, with the options that it owns.

A pass is light to import: heavy modules are imported only where it applies.
"""

"""The passes of a merge: one module each, with the options that it owns.

A pass is light to import; what it needs only where it applies, it imports then.
"""

"""Rules, the subjects that they check, and the scan of weights for them."""

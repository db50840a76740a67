"""Words that every room uses, and reports: imports nothing else of ours."""

"""What a rule is, what it looks at, and reading weights for it."""

"""The whole way after training as one step: validate, consolidate if needed, merge, verify, push."""

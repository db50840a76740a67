"""`python -m tests.tensor_tables` writes the table of the tensors that classes of transformers have."""

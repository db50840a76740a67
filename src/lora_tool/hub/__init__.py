"""Publishing a folder on the Hugging Face Hub: planned, validated, in one commit, and compared afterwards."""

"""Parameters in memory that are several tensors on disk, or parts of one: a merge of any other base imports none of this."""

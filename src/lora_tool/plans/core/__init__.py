"""What every plan is made of: operations, steps, files, manifest."""

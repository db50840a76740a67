"""What will be done, as data: every tensor of the output, where it comes from and why."""

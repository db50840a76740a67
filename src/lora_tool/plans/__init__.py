"""Plans, as data: for every tensor of the output, where it comes from and why."""

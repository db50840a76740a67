"""What rules of several families ask."""

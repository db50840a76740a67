"""An adapter in one form → the plan of the same adapter in another."""

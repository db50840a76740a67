"""Base and adapters → the plan of a merged model."""

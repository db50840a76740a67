"""LT6xx: a merged model against the model that its plan expects."""

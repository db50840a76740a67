"""LT6xx: a merged model against what it should be."""

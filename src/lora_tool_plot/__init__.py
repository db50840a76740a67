"""Pictures of an adapter and of its training: a PNG, or one HTML file that needs no network. Needs the extra `plot`."""

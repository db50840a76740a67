"""Training through TRL with guards: the parent is light and launches one worker that builds TRL's own trainer."""

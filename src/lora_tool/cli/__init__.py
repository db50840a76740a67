"""The command line: each command parses, makes one library call, prints the result and sets the exit code."""

"""Work on other machines: tasks as plain data, and the one engine that hands them out, Ray."""

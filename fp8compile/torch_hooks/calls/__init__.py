"""One call of what a user has compiled: which graphs it made, from which line, and what is said of it."""

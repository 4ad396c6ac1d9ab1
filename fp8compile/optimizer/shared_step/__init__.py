"""One traced rule for all parameters that are updated alike."""

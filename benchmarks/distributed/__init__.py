"""Several GPUs."""

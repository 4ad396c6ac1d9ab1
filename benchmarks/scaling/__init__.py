"""Time and memory on many GPUs, by arithmetic."""

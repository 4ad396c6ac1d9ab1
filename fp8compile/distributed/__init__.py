"""Weights that FSDP2 gathers as FP8, and gradients exchanged in FP8."""

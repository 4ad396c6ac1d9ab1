"""Optimizer steps with 8-bit states."""

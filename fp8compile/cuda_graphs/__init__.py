"""Whole training steps in one CUDA graph."""

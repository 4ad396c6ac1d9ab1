"""FP8 checkpoints that other libraries load, and the way back."""

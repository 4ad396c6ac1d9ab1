"""Training: whole steps, blocks, what is saved, compile time, convergence."""

"""What Inductor does otherwise for graphs of this backend."""

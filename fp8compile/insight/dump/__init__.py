"""A compilation written to a folder: its graphs at every stage, its plan, its kernels, and one page of all."""

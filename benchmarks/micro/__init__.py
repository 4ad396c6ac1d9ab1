"""Single kernels: matmuls, casts, the loss, and how exact they are."""

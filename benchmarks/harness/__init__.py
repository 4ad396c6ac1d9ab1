"""What benchmarks have in common: processes, clocks, systems, workloads, tables."""

"""What the benchmarks share: loading, timing, ceilings, result files, plots."""

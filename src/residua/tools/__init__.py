"""Programs around the library: the command, plans, studies, evaluations, benchmarks."""

"""`python -m benchmarks.doctor`: planted faults and healthy models, and what `diagnose` says first of each."""

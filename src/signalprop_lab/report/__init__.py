"""What the laboratory adds to a report: training runs, sweeps, reproductions; found by their entry points."""

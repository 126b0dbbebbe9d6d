"""Training: recipes, their data, runs, sweeps. Runs are a loop on accelerate."""

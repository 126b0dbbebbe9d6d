"""Training: recipes, their data, runs, sweeps. Runs are a loop of our own on accelerate."""

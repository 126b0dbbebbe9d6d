"""Training: recipes, their data, runs, sweeps. Runs are those of the Hugging Face Trainer."""

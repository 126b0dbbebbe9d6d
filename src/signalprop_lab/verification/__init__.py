"""Every formula against a simulation of what it describes."""

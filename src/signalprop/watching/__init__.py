"""Hooks on a live model, and the statistics that they take of its tensors."""

"""Hooks on a live model, and what they make of the tensors that pass."""

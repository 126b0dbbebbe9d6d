"""The residual stream of any model, found by following additions."""

"""Attention within a window whose keys are its values too, one head of them for all queries (DeepSeek-V4)."""

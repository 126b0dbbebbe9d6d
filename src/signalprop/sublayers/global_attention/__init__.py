"""Self-attention with other heads than those of the other layers (Gemma 4's full attention)."""

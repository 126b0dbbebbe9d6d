"""Self-attention with heads of its own, beside those that other layers have (Gemma 4's full attention)."""

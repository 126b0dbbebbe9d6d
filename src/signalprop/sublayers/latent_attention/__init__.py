"""Attention whose keys and values are read from a small latent vector per token (DeepSeek-V2)."""

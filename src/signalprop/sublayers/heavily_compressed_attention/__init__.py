"""`shared_kv_attention` that sees averages of all earlier runs of tokens, too (DeepSeek-V4)."""

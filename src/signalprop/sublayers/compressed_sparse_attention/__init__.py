"""`heavily_compressed_attention` of short runs, each averaged with the run before it (DeepSeek-V4)."""

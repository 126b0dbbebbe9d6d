"""Files, and values from files: read with one clear line on what is wrong, written whole or not at all."""

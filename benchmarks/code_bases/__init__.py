"""Models that are not of transformers, in the shapes of public code bases, and what every verb does with them."""

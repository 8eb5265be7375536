"""Norms, rotary embeddings and attention written as the single operators that the standard has for them."""

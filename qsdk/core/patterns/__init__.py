"""Supergroups: the language of patterns, the patterns, and the search for them."""

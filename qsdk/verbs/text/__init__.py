"""Metrics of language models over token ids of any tokenizer: perplexity, and how often two models agree."""

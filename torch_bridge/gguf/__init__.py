"""A sim of a causal language model written as one GGUF file for llama.cpp: its types, names, facts and tokenizer."""

"""Arithmetic on 64-bit integers between quantizers, with proven bounds and errors. Import the files."""

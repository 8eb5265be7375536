"""Check and measure an integer-only model. Import the files."""

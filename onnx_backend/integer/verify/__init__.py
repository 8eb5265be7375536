"""What is checked and measured of an integer-only model. Import the files."""

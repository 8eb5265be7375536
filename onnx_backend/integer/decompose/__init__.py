"""What is written out in simpler operators before the conversion. Import the files."""

"""Integer models in operators and ranges that every installed runtime computes exactly. Import the files."""

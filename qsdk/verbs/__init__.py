"""The verbs of the public face: the only folder that knows both sides. Import the files."""

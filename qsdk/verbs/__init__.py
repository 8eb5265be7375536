"""The verbs of the public face: the only folder that knows both doors. Import the files."""

"""The two doors behind one protocol, so that a verb is written once."""

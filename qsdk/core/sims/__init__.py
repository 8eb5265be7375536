"""The state of a sim, the same for both sides: freezing, planning again, files."""

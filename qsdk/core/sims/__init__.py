"""The state of a sim, the same at both doors: freezing, planning again, files."""

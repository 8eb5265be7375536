"""What each runtime reads as the simulation says, as tables, and the form in which files are written for it."""

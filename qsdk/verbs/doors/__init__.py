"""One protocol for sims of both sides (the two doors), so that each verb is written once."""

"""Sites that one scale serves badly, and the search for the few that must be wider."""

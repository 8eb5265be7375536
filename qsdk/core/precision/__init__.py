"""What one scale serves badly, and the search for the few sites that must be wider."""

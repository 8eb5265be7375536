"""The user's configuration: presets, rules, and their JSON form."""

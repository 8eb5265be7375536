"""What the user asks for: presets, rules, and their JSON form."""

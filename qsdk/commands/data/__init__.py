"""What the command line reads besides arrays: pictures, labels, and functions of the user."""

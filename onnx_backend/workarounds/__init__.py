"""What hangs on private behaviour of other libraries, with the version it was seen on; tests say when it may go."""

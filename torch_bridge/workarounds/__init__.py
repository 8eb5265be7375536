"""What hangs on private behaviour of torch or of the system, each with a test that fails when it is needed no more."""

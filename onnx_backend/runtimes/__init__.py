"""What one runtime each reads, misreads, computes fast and how it is run: an object per runtime, in one list."""

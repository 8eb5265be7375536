"""Lower each node of the Q/DQ model to recorded operations: a function per op type. Import the files."""

"""Write an integer-only model as a program for firmware. Import the files."""

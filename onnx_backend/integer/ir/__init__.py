"""What lowerings speak in: values, recorded operations and their constants. Import the files."""

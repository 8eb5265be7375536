"""Write composite operators as simpler ones before the conversion. Import the files."""

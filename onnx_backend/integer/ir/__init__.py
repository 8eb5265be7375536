"""The intermediate representation of a conversion: values, operations and their constants. Import the files."""

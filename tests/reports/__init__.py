"""What is printed and written."""

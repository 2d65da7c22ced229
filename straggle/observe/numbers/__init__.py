"""A run's numbers: read from its files, and declared once."""

"""The run as one HTML page."""

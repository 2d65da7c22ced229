"""Members whose work or link is slow: put out, and let in again."""

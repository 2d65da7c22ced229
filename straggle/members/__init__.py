"""Ranks that come and go: signs of life, views and healing."""

"""Ranks that come and go: signs of life, views, healing, and what a replay needs of it."""

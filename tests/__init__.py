"""A folder a level; README.md says which."""

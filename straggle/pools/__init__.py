"""Micro-batches that ranks draw from a step's pool."""

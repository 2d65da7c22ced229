"""Estimators compared: with known gradients, and by how training ends under each."""

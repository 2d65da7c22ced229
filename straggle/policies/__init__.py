"""Policies that the user chooses: deadlines, wrappers around them, estimators, and the history that they see."""

"""What the user chooses: deadlines, wrappers around them, estimators, and what they see."""

"""Which rank is stuck, and where in the user's code."""

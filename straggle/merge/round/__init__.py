"""A step on its way through the merge: rounds, buffers, what is submitted, what is merged."""

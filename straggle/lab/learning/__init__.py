"""Training of many logical ranks in one process, under partial gradients."""

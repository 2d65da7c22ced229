"""A step as it would have been: under DDP, with no rank late, under another deadline."""

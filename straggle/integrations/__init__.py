"""straggle in trainers of others, one module for each; import the one that you use."""

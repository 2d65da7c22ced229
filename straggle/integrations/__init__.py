"""straggle in the trainers of other libraries, one module for each; import the one that you use."""

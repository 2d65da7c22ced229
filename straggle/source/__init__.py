"""Where gradients come from, and where merged ones go."""

"""Workers that are started, and started again: what `straggle launch` is made of."""

"""Which samples each rank has in a step: dealt out by speed, drawn from a pool."""

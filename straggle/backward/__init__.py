"""One process's pass: stages, hooks, clocks; `StagedBackward`."""

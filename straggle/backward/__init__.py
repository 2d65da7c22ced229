"""The backward pass of one process: stages, hooks, clocks; `StagedBackward`."""

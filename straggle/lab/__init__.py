"""Faults, workloads, jobs, the simulator, estimators compared."""

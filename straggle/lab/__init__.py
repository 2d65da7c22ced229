"""Faults, workloads, jobs, the simulator, judged estimators."""

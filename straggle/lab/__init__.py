"""Faults, workloads, jobs, the simulator."""

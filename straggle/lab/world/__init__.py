"""Ranks that train in one process, in virtual time, in an order drawn from a seed."""

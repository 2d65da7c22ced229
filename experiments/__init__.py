"""Experiments with known answers: each is a command that prints what was expected beside what was measured."""

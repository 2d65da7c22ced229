"""Replay: repeat a recorded run bit for bit."""

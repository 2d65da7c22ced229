"""Replay: a recorded run is repeated bit for bit."""

"""What is reported: trace, metrics, the page of a run, `watch`."""

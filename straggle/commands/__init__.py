"""The commands: `python -m straggle train`, `compare`, ... over `conf/`."""

"""The models and data that the commands train."""

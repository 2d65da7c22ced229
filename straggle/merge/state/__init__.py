"""A module's state beside its gradients, kept the same on all ranks."""

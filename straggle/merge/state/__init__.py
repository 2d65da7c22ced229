"""What a module holds beside its gradients: kept the same on all ranks."""

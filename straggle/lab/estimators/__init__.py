"""Estimators judged: against gradients that are known, and by what training comes to under each."""

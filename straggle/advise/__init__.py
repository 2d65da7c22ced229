"""Which rank is slow, since when and in what, and what each policy would be worth, from a run's recorded times."""

"""Who is slow, since when, in what, and what each policy would be worth: read from the times that a run recorded."""

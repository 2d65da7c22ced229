"""Who is late, and what is done: two sides, a deadline, the stand-in."""

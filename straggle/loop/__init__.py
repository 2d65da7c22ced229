"""Behind a training loop's step: what a wrapped model is made of, and what happens while a step is open."""

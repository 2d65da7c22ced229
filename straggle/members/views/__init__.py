"""Who is a member: views in the store, signs of life, who asks to be let in."""

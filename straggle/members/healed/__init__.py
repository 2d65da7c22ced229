"""The state that a member gets when it comes back."""

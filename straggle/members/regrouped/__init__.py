"""Groups of the members, and the step that runs while these change."""

"""What a step costs a rank, and what of it goes with its samples."""

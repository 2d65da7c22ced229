"""What a run leaves on the disk, to go on from or to run again."""

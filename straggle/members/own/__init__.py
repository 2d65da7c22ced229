"""The default process group of a job whose members change: collectives of the loop's own go on without a lost rank."""

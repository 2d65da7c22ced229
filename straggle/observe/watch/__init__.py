"""Where the time of each rank goes, in a job as it is."""

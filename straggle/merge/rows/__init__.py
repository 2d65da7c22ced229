"""What ranks report with each merge: one row each, the table of all, the record of a step."""

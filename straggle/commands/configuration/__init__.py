"""A command's configuration: from its command line, checked before there are ranks."""

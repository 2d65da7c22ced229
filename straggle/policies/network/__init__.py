"""The links between ranks: how long a merge takes over them, and whose is slow."""

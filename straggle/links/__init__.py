"""What the network does: pings, and ranks outside of the ring because of their links."""

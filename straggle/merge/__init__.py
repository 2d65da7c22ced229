"""Many ranks: rounds, buffers, coordinator, stand-in, channel, telemetry."""

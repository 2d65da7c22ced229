"""A device that takes known times for what is queued on it, by a clock; its marks are the moments at which they end."""

import contextlib
import time


class PacedDevice:
    """``sleep`` moves the clock. ``num_waits``: how often the host was made to wait."""

    is_queued = True

    def __init__(self, clock=time.monotonic, sleep=time.sleep):
        self.clock, self.sleep = clock, sleep
        self.free_at, self.num_waits, self.queued_s = clock(), 0, 0.0

    def work(self, seconds):
        """Queue a kernel."""
        self.free_at = max(self.free_at, self.clock()) + seconds
        self.queued_s += seconds

    def drain(self):
        """Wait for all that is queued, as a loop does that reads a loss."""
        self.sleep(max(0.0, self.free_at - self.clock()))

    def mark(self, again=None):  # noqa: ARG002
        return max(self.free_at, self.clock())

    def ready(self, mark):
        return self.clock() >= mark

    def wait(self, mark):
        self.num_waits += 1
        self.sleep(max(0.0, mark - self.clock()))

    def wait_for_all(self):
        self.wait(self.free_at)

    def after_queue(self, queue):
        pass

    def seconds_between(self, before, after):
        return after - before

    def copy_to_host(self, numbers):
        return numbers.clone()

    def own_queue(self):
        return contextlib.nullcontext()

    def queue(self):
        return None

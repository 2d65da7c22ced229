"""What a step asks of a CUDA device: calls on which the host waits, copies, launches; by torch's profiler."""

import contextlib
import re
import threading
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import straggle
from straggle.report import text_table

WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize")
LAUNCH = re.compile(r"cu(da)?Launch(?!Host)")
ACTIVITIES = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
HEADER = ("of a step", "host waits", "ms in them", "by other threads", "to host", "to device", "launches", "kernel ms")
_SPAN = "the steps"
_PACKAGE = Path(straggle.__file__).parent


def calls_of(step, num_steps):
    """Cells of a table with `HEADER`, but for the first, and the calls on which a thread waited, by name."""
    calls = _events_of(step, num_steps)
    per_step = {name: f"{value / num_steps:.2f}" for name, value in calls["sums"].items()}
    names = ", ".join(f"{number / num_steps:g} {name}" for name, number in sorted(calls["waits"].items()))
    columns = ("waits", "wait_ms", "waits_elsewhere", "to_host", "to_device", "launches", "kernel_ms")
    return [per_step[name] for name in columns], names or "none"


def print_calls(cells_and_names):
    """The table of several ways, and below it which calls they waited on."""
    print(text_table([HEADER, *((way, *cells) for way, (cells, _) in cells_and_names.items())]))
    for way, (_, names) in cells_and_names.items():
        print(f"  {way}: waits on {names}")


def _events_of(step, num_steps):
    """Sums over the steps; the span marks them off from the profiler's own calls, and from the wait at the end."""
    with profile(activities=ACTIVITIES) as profiled:
        with record_function(_SPAN):
            for _ in range(num_steps):
                step()
        torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()
    on_host = [event for event in events if event.device_type() == torch._C._autograd.DeviceType.CPU]
    on_device = [event for event in events if event.device_type() == torch._C._autograd.DeviceType.CUDA]
    (span,) = (event for event in on_host if event.name() == _SPAN)
    inside = [event for event in on_host if span.start_ns() <= event.start_ns() <= span.end_ns()]
    return _summed(inside, on_device, span.device_resource_id())


def _summed(on_host, on_device, thread):
    waits = [event for event in on_host if WAIT.match(event.name())]
    own = [event for event in waits if event.device_resource_id() == thread]
    named = {event.name() for event in on_host}  # what the host named is a span on the device, too, and no kernel
    kernels = [event for event in on_device if event.name() not in named and not event.name().startswith("Mem")]
    sums = {
        "waits": len(own),
        "wait_ms": sum(event.duration_ns() for event in own) / 1e6,
        "waits_elsewhere": len(waits) - len(own),
        "to_host": sum(event.name().startswith("Memcpy DtoH") for event in on_device),
        "to_device": sum(event.name().startswith("Memcpy HtoD") for event in on_device),
        "launches": sum(LAUNCH.match(event.name()) is not None for event in on_host),
        "kernel_ms": sum(event.duration_ns() for event in kernels) / 1e6,
    }
    return {"sums": sums, "waits": Counter(event.name() for event in waits)}


def waiting_lines(step, num_steps):
    """How often a step waits for the device in which lines: those of straggle, or else the innermost outside of torch.

    By torch's own warnings, which are of the operations that read a tensor back, and by the calls that wait for an
    event, a stream or the device.
    """
    found = Counter()
    mode = torch.cuda.get_sync_debug_mode()
    with _noted(found), warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning

        def show(message, *words, **named):
            if "synchronizing" in str(message):
                found[_place()] += 1
            else:
                shown(message, *words, **named)

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(num_steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return {place: number / num_steps for place, number in found.most_common()}


@contextlib.contextmanager
def _noted(found):
    """In this block, the calls that wait count in ``found`` by their place."""
    owners = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize"))
    calls = [(owner, name, getattr(owner, name)) for owner, name in owners]

    def noting(call):
        def noted(*args, **named):
            found[_place()] += 1
            return call(*args, **named)

        return noted

    for owner, name, call in calls:
        setattr(owner, name, noting(call))
    try:
        yield
    finally:
        for owner, name, call in calls:
            setattr(owner, name, call)


def _place():
    """The innermost line of straggle and the one that called it; without one, the innermost that is not torch's."""
    frames = [frame for frame in traceback.extract_stack()[:-2] if "/torch/" not in frame.filename]
    own = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents]
    shown = own[-1:-3:-1] or frames[-1:]
    lines = (f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in shown)
    return " < ".join(lines) + f" ({threading.current_thread().name})"

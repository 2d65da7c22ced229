"""A process that sends slowly: its TCP sockets get a pace from outside, with no namespace, queue or program between.

Linux paces a socket itself (``SO_MAX_PACING_RATE``); another process may set it on a copy of the descriptor
(``pidfd_getfd``) if it may trace this one: its parent, or root. Only sending is slow, as on a link whose uplink is.
"""

import ctypes
import os
import socket
import struct
from pathlib import Path

_PACE = 47  # SO_MAX_PACING_RATE, which Python does not name
_GETFD = 438  # pidfd_getfd, the same number on all architectures
_UNLIMITED = 0xFFFFFFFF


def family(pid):
    """A process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task").glob("*/children")
        found = [int(child) for path in children for child in path.read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(each for child in found for each in family(child))]


def pace(pid, bytes_per_s=_UNLIMITED):
    """Set the pace of every TCP socket that a process and its children have now; how many there were.

    Raises ``OSError`` if this process may not trace that one, or the kernel has no ``pidfd_getfd``.
    """
    return sum(_pace_of_one(own, int(bytes_per_s)) for own in family(pid))


def _pace_of_one(pid, bytes_per_s):
    try:
        number, paths = os.pidfd_open(pid), list(Path(f"/proc/{pid}/fd").iterdir())
    except (ProcessLookupError, FileNotFoundError):
        return 0
    try:
        sockets = [path for path in paths if _target(path).startswith("socket:")]
        return sum(_pace_socket(number, int(path.name), bytes_per_s) for path in sockets)
    finally:
        os.close(number)


def _target(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _pace_socket(process, descriptor, bytes_per_s):
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_GETFD, process, descriptor, 0)
    if copy < 0:
        if ctypes.get_errno() in (9, 3):  # it was closed meanwhile, or the process has ended
            return 0
        raise OSError(ctypes.get_errno(), "pidfd_getfd: this process may not trace the other one")
    try:
        own = socket.socket(fileno=copy)
    except OSError:  # it was closed meanwhile, and its number is another file's
        os.close(copy)
        return 0
    with own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return 0
        own.setsockopt(socket.SOL_SOCKET, _PACE, struct.pack("=I", bytes_per_s))
        return 1

"""Draws docs/console.svg, what a run shows in a terminal: python docs/console.py [key=value ...]

It starts ./launch.sh with these arguments. The picture has the live line as it was halfway, and the end of the run.
"""

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 110
LINE = re.compile(r"\r?\x1b\[2K|\r(?!\n)")  # the terminal's cursor goes back, and the line is written again
CURSOR = re.compile(r"\x1b\[\?25[lh]|\x1b\[\d*A")
DONE = re.compile(r"(?:\x1b\[[\d;]*m)* *(\d+)/(\d+)")
FONTS = re.compile(r" *@font-face {.*?}\n", re.DOTALL)  # of another address


def shown(arguments):
    """What ./launch.sh writes to a terminal, with each state of the live line."""
    raw = bytearray()

    def read(descriptor):
        raw.extend(data := os.read(descriptor, 65536))
        return data

    os.environ.update(COLUMNS=str(WIDTH), TERM="xterm-256color")
    if pty.spawn([str(HERE.parent / "launch.sh"), *arguments], read):
        sys.exit("the run failed, and docs/console.svg is as it was")
    return CURSOR.sub("", raw.decode())


def picture(arguments):
    """The picture's lines: those of the run, and for the live line a state of it halfway and the last one."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print("$ ./launch.sh", *arguments, style="bold")
    for line in shown(arguments).replace("\r\n", "\n").rstrip().split("\n"):
        states = LINE.split(line)
        counts = [(state, *map(int, found.groups())) for state in states if (found := DONE.match(state))]
        if halfway := [state for state, done, steps in counts if 2 * done >= steps]:
            console.print(Text.from_ansi(halfway[0]))
            console.print("...")
        console.print(Text.from_ansi(states[-1]))
    (HERE / "console.svg").write_text(FONTS.sub("", console.export_svg(title="straggle")))


if __name__ == "__main__":
    picture(sys.argv[1:])

"""The commands, each with its own help; without a word they are listed.

python -m straggle train workload=digits steps=100
torchrun --nproc-per-node 4 -m straggle train steps=100
straggle launch --nproc-per-node 4 train.py
python -m straggle report runs/latest
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

from straggle.commands.process_end import end_process
from straggle.extras import MissingExtra

# of each: the module with its main(), and what it does
COMMANDS = {
    "train": ("straggle.commands.train", "train a workload with straggle; one worker, or as many as torchrun starts"),
    "launch": ("straggle.commands.launch", "a script on several workers; one that dies is started again by itself"),
    "watch": ("straggle.commands.watch", "run a DDP script as it is, and record where each rank's time goes"),
    "compare": ("straggle.commands.compare", "the same job under DDP and other methods, in turns"),
    "simulate": ("straggle.commands.simulate", "many ranks under a deadline, without a cluster"),
    "advise": ("straggle.commands.advise", "who is slow in a recorded run, and what a deadline would be worth"),
    "report": ("straggle.commands.report", "a run as one HTML page"),
    "check": ("straggle.commands.configuration.config", "COMMAND key=value ...: whether its configuration is valid"),
}
_OF_A_JOB = ("train", "launch")  # other processes wait for the end of theirs
_USAGE = "python -m straggle COMMAND ...\n" + "".join(f"  {word:<10} {what}\n" for word, (_, what) in COMMANDS.items())


def main() -> int:
    """Run the command that the first word names; gives its exit status, 2 where there is no such word."""
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if not words or words[0] not in COMMANDS:
        sys.stderr.write((f"no command {words[0]}\n" if words else "") + _USAGE)
        return 2
    sys.argv[1:] = words[1:]
    try:
        status: int | None = import_module(COMMANDS[words[0]][0]).main()
    except MissingExtra as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return 130
    return status or 0


def run() -> NoReturn:
    """`main`, as the process's program."""
    word, status = sys.argv[1:2], main()
    if word and word[0] in _OF_A_JOB:
        end_process(status)
    raise SystemExit(status)


if __name__ == "__main__":
    run()

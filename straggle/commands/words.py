"""The words of the commands: what stands after `straggle`."""

from __future__ import annotations

# of each: the module with its main(), and what it does
COMMANDS = {
    "train": ("straggle.commands.train", "train a workload with straggle; one worker, or as many as torchrun starts"),
    "launch": ("straggle.commands.launch", "a script on several workers; one that dies is started again by itself"),
    "watch": ("straggle.commands.watch", "run a DDP script as it is, and record where each rank's time goes"),
    "compare": ("straggle.commands.compare", "the same job under DDP and other methods, in turns"),
    "simulate": ("straggle.commands.simulate", "many ranks under a deadline, without a cluster"),
    "advise": ("straggle.commands.advise", "who is slow in a recorded run, and what a deadline would be worth"),
    "report": ("straggle.commands.report", "a run as one HTML page"),
    "check": ("straggle.commands.config", "COMMAND key=value ...: whether a configuration of these is valid"),
}

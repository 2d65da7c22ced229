"""Time to a loss with eight micro-batches in a step: pulled beside all methods of head to head, in all its scenarios.

python benchmarks/pulled_loss.py --task text --scenario slow_rank      # one part, 4 to 8 minutes
python benchmarks/pulled_loss.py                                       # all ten parts, about an hour
python benchmarks/pulled_loss.py --only-table                          # of the parts that were made
python benchmarks/pulled_loss.py --quick --task text --scenario slow_rank

Each part is one `straggle compare` on five ranks, with 60 steps of each method in turns of ten: text (a GPT of two
blocks) and digits (six convolutions). Passes of text sleep 20 ms for each micro-batch; those of digits sleep four times
as long as they compute. So ranks that share few cores contend little. A cell is the time in which a method reaches
DDP's final loss on held-out data, over DDP's, and the range over DDP's losses; then the share that was dropped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

METHODS = ("ddp", "dropcompute", "backup_workers", "majority", "local_sgd", "straggle", "straggle_rebalanced")
METHODS += ("straggle_pulled",)
SCENARIOS = ("none", "slow_rank", "stall", "dropcompute", "everyone_noisy")
TASKS = {
    "text": ["workload=paced", "workload.seconds=0.02", "batch_size=1", "faults.pace=null"],
    "digits": ["workload=digits", "batch_size=8"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--scenario", choices=SCENARIOS, nargs="+", default=SCENARIOS)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of each method")
    parser.add_argument("--block", type=int, default=10, help="steps of one method before it is the next one's turn")
    parser.add_argument("--folder", type=Path, default=Path("runs/pulled_loss"))
    parser.add_argument("--quick", action="store_true", help="ten steps of DDP, straggle and pulled, in turns of five")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    methods = METHODS
    if arguments.quick:
        arguments.steps, arguments.block, methods = 10, 5, ("ddp", "straggle", "straggle_pulled")
    for task in arguments.task:
        for scenario in () if arguments.only_table else arguments.scenario:
            compare(arguments, task, scenario, methods)
        print_markdown(arguments.folder, task)


def compare(arguments, task, scenario, methods) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    command += ["-m", "straggle", "compare", f"methods=[{','.join(methods)}]", *TASKS[task], f"scenarios=[{scenario}]"]
    command += ["num_microbatches=8", "rebalance=none", f"steps={arguments.steps}", f"block={arguments.block}"]
    subprocess.run([*command, f"run_dir={arguments.folder}/{task}"], check=True)


def print_markdown(folder: Path, task: str) -> None:
    """The table of a task, of the scenarios that are there."""
    found = {name: folder / task / name / "compare.json" for name in SCENARIOS}
    results = {name: json.loads(path.read_text()) for name, path in found.items() if path.is_file()}
    if not results:
        return
    print(f"| {task} | {' | '.join(results)} |\n| --- |{' --- |' * len(results)}")
    for method in METHODS[1:]:
        cells = [cell(of.get(method)) for of in results.values()]
        print(f"| {method} | {' | '.join(cells)} |")


def cell(of) -> str:
    if of is None:
        return ""
    low, high = of["time_to_loss_ratio_range"]
    ratio = "never" if of["time_to_loss_ratio"] is None else f"{of['time_to_loss_ratio']:.2f}"
    between = " to ".join("never" if bound is None else f"{bound:.2f}" for bound in (low, high))
    return f"{ratio} ({between}), {of['dropped_share']:.1%}"


if __name__ == "__main__":
    main()

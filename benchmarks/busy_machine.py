"""What other programs cost a training run on a CPU, and what the waiting of its threads has to do with it.

    python benchmarks/busy_machine.py            # prints
    python benchmarks/busy_machine.py --save     # and writes results/busy_machine.json

The threads of GNU's OpenMP, which torch uses on Linux, wait for each other by spinning. Where a thread
waits for one that another program has pushed aside, it burns the processor's time instead of giving it to
the one it waits for. GOMP_SPINCOUNT says how often a thread looks before it sleeps. Here the same short run
is timed with each setting, in turn, on the machine as it is and beside one program that only computes.
Found: never spinning (0) is best beside another program and costs a sixth without one; a middle setting has
the worst of both. So tinygpt leaves it as it is.
"""

import argparse
import os
import subprocess
import sys
import tempfile

from data_machine import save, spread

from tinygpt.speedrun import timed_process

SETTINGS = {"libgomp's own": None, "0": "0", "10000": "10000"}


def training(folder: str, steps: int) -> list[str]:
    "The command that is timed: a short run of the preset speedrun."
    command = [sys.executable, "-m", "tinygpt.train", "speedrun", "--data", "sotu"]
    command += ["--out", folder, "--overwrite", "--max-steps", str(steps)]
    command += ["--final-eval-tokens", "1000", "--threads", str(os.cpu_count())]
    return command


def timings(command: list[str], rounds: int, beside: int) -> dict[str, list]:
    "(wall, CPU) seconds of the command with each setting, in turn, beside so many busy programs."
    plain = dict(os.environ)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        plain.pop(name, None)
    times = {name: [] for name in SETTINGS}
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
    try:
        for i in range(rounds + 1):
            for name, value in SETTINGS.items():
                setting = {"GOMP_SPINCOUNT": value} if value else {}
                done, wall, cpu = timed_process(command, env=plain | setting)
                done.check_returncode()
                if i:  # the first round prepares the data
                    times[name].append((wall, cpu))
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return times


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = training(folder, args.steps)
        for beside in (0, 1):
            for name, pairs in timings(command, args.rounds, beside).items():
                walls, cpus = zip(*pairs)
                row = dict(programs_beside=beside, spincount=name, wall_s=spread(walls), cpu_s=spread(cpus))
                rows.append(row)
                where = f"{beside} programs beside, GOMP_SPINCOUNT {name:14s}"
                print(f"{where} wall {row['wall_s']}, CPU {row['cpu_s']}", flush=True)
    if args.save:
        save("busy_machine", dict(rows=rows))


if __name__ == "__main__":
    main()

"""What the benchmarks share: results written beside the scripts, the spread of runs, the choice of a rate.

With each result stand the machine, the versions, the command and the date.
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tinygpt.run.report import cpu_name
from tinygpt.support import atomic_path


def machine() -> str:
    "A line on the machine, torch's threads and the versions."
    cpu = f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}"
    return f"{cpu}, Python {platform.python_version()}, torch {torch.__version__}"


def save(
    name: str,  # of the file, without .json
    result: dict,  # its entries go before those about the machine
    folder: Path | None = None,  # None: results
    quiet: bool = False,  # do not say so
) -> Path:
    "Write NAME.json."

    def installed(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("torch", "numpy", "tiktoken", "rustbpe", "pyarrow")
    script = os.path.relpath(sys.argv[0], Path(__file__).parent.parent)  # as called from the project's folder
    about = dict(
        machine=f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()}",
        versions={"python": platform.python_version(), **{p: installed(p) for p in packages}},
        command=" ".join(["python", script, *sys.argv[1:]]),
        threads=os.environ.get("OMP_NUM_THREADS"),
        date=time.strftime("%Y-%m-%d"),
        load=round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    )
    path = (folder or Path(__file__).parent / "results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as tmp:
        tmp.write_text(json.dumps({**about, **result}, indent=2) + "\n")
    if not quiet:
        print(f"written: {path}")
    return path


def load(
    name: str,  # of the file, without .json
) -> dict:
    "What `save` wrote."
    return json.loads((Path(__file__).parent / "results" / f"{name}.json").read_text())


class Kept:
    "Runs in results/NAME.json, written one by one; a run that the file holds is not made again."

    def __init__(
        self,
        name: str,
        **head,  # what else the file says
    ):
        self.name, self.head = name, head
        try:
            self.runs = load(name)["runs"]
        except FileNotFoundError:
            self.runs = []

    def get(
        self,
        key: dict,  # what tells the run from others
        make,  # make() -> what else is known of it
    ) -> dict:
        "The run."
        found = next((run for run in self.runs if key.items() <= run.items()), None)
        if found is None:
            found = key | make()
            print(*found.values(), flush=True)
            self.runs.append(found)
            self.save()
        return found

    def save(self):
        "Write the file."
        save(self.name, self.head | dict(runs=self.runs), quiet=True)


def lowest(
    found: dict,  # rate: loss
) -> float:
    "The rate with the lowest loss."
    return min(found, key=found.get)


def doubled(rate: float, up: bool) -> float:
    "The next rate, twice or half of this one."
    return 2 * rate if up else rate / 2


def tune(
    measure,  # measure(rate): its loss, or whatever `best` understands
    rates,  # to begin with
    best=lowest,  # best({rate: what was measured}): the best rate
    beyond=doubled,  # beyond(rate, up): the next one
    most: float = math.inf,  # rates in all
) -> dict:
    "What was measured, by rate: at these, and at further ones while the best is the lowest or the highest."
    found = {rate: measure(rate) for rate in rates}
    while len(found) < most:
        at = best(found)
        if min(found) < at < max(found):
            break
        further = beyond(at, up=at == max(found))
        found[further] = measure(further)
    return found


def spread(values) -> dict:
    "Median, smallest and largest, to three digits."
    values = list(values)
    return dict(
        median=round(statistics.median(values), 3), min=round(min(values), 3), max=round(max(values), 3)
    )

"""Keeps what `python -m tinygpt.whole` measured as results/whole.json, for the page of the whole process.

python -m tinygpt.whole
python -m tinygpt.whole --out runs/whole1 --seed 1
python -m tinygpt.whole --out runs/whole2 --seed 2
python benchmarks/whole.py runs/whole runs/whole1 runs/whole2

The page shows the first process, and differences over all of them.
"""

import argparse
import json
from pathlib import Path

from data_machine import save


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of a process each; the first is shown")
    folders = parser.parse_args().folders
    processes = [json.loads((folder / "results.json").read_text()) for folder in folders]
    save("whole", dict(command="python -m tinygpt.whole", stages=processes[0], others=processes[1:]))


if __name__ == "__main__":
    main()

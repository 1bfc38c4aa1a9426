"""Draw the pictures of README.md: chapter 20's ladder, from its record, and the map of the chapters.

python tools/picture.py      draw them again, with their words, if these have changed (part of `make export`)
"""

import json
import re
import statistics
import sys
from pathlib import Path

import nbformat
import overview
from pages import ROOT, notebook_text

sys.path.insert(0, str(ROOT))
from tinygpt.speedrun_gain import COLORS, GOAL, climb  # noqa: E402

INDEX, PICTURE = ROOT / "nbs/index.ipynb", ROOT / "nbs/images/ladder.png"
MAP = ROOT / "nbs/images/map.png"
LINE = re.compile(r"^!\[.*\]\(images/ladder\.png\)$", re.M)  # in the index
MAP_LINE = re.compile(r"^!\[.*\]\(images/map\.png\)$", re.M)
CHAPTERS = {  # where the book builds what a rung turns on
    "four times the rate": "11",
    "straight down to 0": "11",
    "a short warm-up": "11",
    "Muon": "14",
    "three times AdamW's rate": "14",
    "no warm-up": "14",
    "RoPE": "06",
    "RMSNorm": "06",
    "QK-norm": "06",
    "ReLU²": "06",
    "own head": "06",
    "start at zero": "05",
    "soft cap": "06",
}
LAST = "soft cap"  # the last rung with nanoGPT's four layers of 128; what comes after is in chapter 20 alone


def shown_rungs() -> list[dict]:
    "The rungs that were kept and have nanoGPT's layers, each on top of those before it."
    record = json.loads((ROOT / "benchmarks/results/speedrun_ladder.json").read_text(encoding="utf-8"))
    kept = [row for row in climb(record["rungs"]) if row["kept"]]
    return kept[: [row["name"] for row in kept].index(LAST) + 1]


def seconds(row: dict) -> float:
    return statistics.median(row["seconds"].values())


def title(rows: list[dict]) -> str:
    clear = sum(not row["noise"] for row in rows[1:])
    times = seconds(rows[0]) / seconds(rows[-1])
    return (
        f"{times:.1f} times less CPU time to the same loss, with nanoGPT's layers: "
        f"{clear} of the {len(rows) - 1} changes are outside the noise"
    )


def words(rows: list[dict]) -> str:
    "The picture in words, for those who cannot see it: its title and all its numbers."
    bars = ", ".join(f"{row['name']} {seconds(row):.0f}" for row in rows)
    noise = ", ".join(row["name"] for row in rows if row["noise"])
    return f"{title(rows)}. CPU seconds to a validation loss of {GOAL}: {bars}. Within the noise: {noise}."


def draw(rows: list[dict], path: Path) -> None:
    "A bar a rung, with a point for each seed. The picture carries its words, so that a test can read them."
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 0.26 * len(rows) + 1.5), dpi=120, layout="constrained")
    for place, row in enumerate(rows):
        ax.barh(place, seconds(row), height=0.62, color=COLORS["noise" if row["noise"] else "less"])
        by_seed = list(row["seconds"].values())
        ax.plot(by_seed, [place] * len(by_seed), "o", color="black", ms=3, alpha=0.6)
        ax.text(max(by_seed) + 3, place, f"{seconds(row):.0f} s", va="center")
    chapters = [f"  (chapter {CHAPTERS[row['name']]})" if row["name"] in CHAPTERS else "" for row in rows]
    first, *others = (row["name"] + chapter for row, chapter in zip(rows, chapters))
    ax.set_yticks(range(len(rows)), [first, *(f"+ {name}" for name in others)])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12 * max(rows[0]["seconds"].values()))
    seeds = len(rows[0]["seconds"])
    what = f"CPU seconds to a validation loss of {GOAL}"
    ax.set_xlabel(f"{what}\nbar: median of {seeds} seeds (points); gray: within the noise", fontsize=9)
    fig.suptitle(title(rows).replace(": ", ":\n"), x=0.01, ha="left", weight="bold", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Description": words(rows)}, pil_kwargs={"optimize": True})
    plt.close(fig)


def drawn_words(path: Path = PICTURE) -> str:
    "The words that a drawn picture carries; nothing, where there is none."
    from PIL import Image

    return Image.open(path).text.get("Description", "") if path.exists() else ""


def main() -> None:
    rows = shown_rungs()
    if drawn_words() != words(rows):
        draw(rows, PICTURE)
        print(f"{PICTURE.relative_to(ROOT)}: drawn from the record")
    if drawn_words(MAP) != overview.words():
        overview.draw(MAP)
        print(f"{MAP.relative_to(ROOT)}: drawn")
    nb = nbformat.read(INDEX, as_version=4)
    for cell in nb.cells:
        cell.source = LINE.sub(lambda _: f"![{words(rows)}](images/ladder.png)", cell.source)
        cell.source = MAP_LINE.sub(lambda _: f"![{overview.words()}](images/map.png)", cell.source)
    INDEX.write_text(notebook_text(nb), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

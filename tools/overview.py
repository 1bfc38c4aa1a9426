"""The map in README.md: a training run, and the chapters that build its parts; `picture.py` draws it."""

from pathlib import Path

TITLE = "One training run, the chapters that build its parts, and in color the first path"
BLUE, YELLOW, RED, VIOLET, OFF = "#dbe9f6", "#fdf1dc", "#f8e0de", "#e8e1f3", "white"  # OFF the path
WIDTH, HEIGHT, APART = 1.74, 0.86, 2.08  # of a box, and from the middle of one column to that of the next
PATH = ("06", "04", "02", "03", "10", "11", "12", "16", "17", "19")  # as the index has it
BOXES = {  # what happens: (column, height, its chapters, color); a line is on the path, or not
    "text becomes tokens": (0, 0, "02 tokenizer", BLUE),
    "tokens fill batches": (1, 0, "03 data", BLUE),
    "the GPT gives a loss": (2, 0, "04 attention · 06 model\n05 init", YELLOW),
    "its gradient, clipped": (3, 0, "12 accumulate", RED),
    "the weights move": (4, 0, "10 adamw · 11 schedule\n14 muon", RED),
    "in which numbers?": (1, -1.3, "01 floats · 08 precision", OFF),
    "how fast?": (2, -1.3, "07 measure · 09 compile", OFF),
    "on how many GPUs?": (3, -1.3, "13 ddp · 15 zero", OFF),
    "save and resume": (4, -2.6, "16 checkpoint", VIOLET),
    "is it any good?": (3, -2.6, "17 evaluate\n18 generate", VIOLET),
    "a better recipe": (2, -2.6, "20 speedrun\n21 scaling", OFF),
    "it learns to answer": (1, -2.6, "22 finetune · 23 prefer\n24 reinforce", OFF),
    "you talk to it": (0, -2.6, "25 chat", OFF),
}
AGAIN = "again and again: 19 train"


def words() -> str:
    "The picture in words, for those who cannot see it."
    parts = [f"{what} ({chapters.replace(chr(10), ' · ')})" for what, (*_, chapters, _) in BOXES.items()]
    return f"{TITLE}: {'; '.join(parts)}; {AGAIN}."


def draw(path: Path) -> None:
    "A step from left to right, how it computes below it, and from right to left what comes after the steps."
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    fig, ax = plt.subplots(figsize=(9.6, 3.9), dpi=120, layout="constrained")
    for what, (column, y, chapters, color) in BOXES.items():
        x, lines = APART * column, 1 + chapters.count("\n")
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        style = "round,pad=0.02,rounding_size=0.08"
        ax.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle=style, fc=color, ec="0.45", lw=0.9))
        ax.text(x, y + 0.05 + 0.08 * lines, what, ha="center", va="center", fontsize=8.8, weight="bold")
        for place, line in enumerate(chapters.split("\n")):
            height = y - 0.15 + 0.175 * ((lines - 1) / 2 - place)
            ink = "black" if line[:2] in PATH else "0.5"
            ax.text(x, height, line, ha="center", va="center", fontsize=8.2, color=ink)

    def arrow(start, end, bend=0.0):
        style = dict(arrowstyle="-|>", color="0.35", lw=1.1, shrinkA=0, shrinkB=0)
        ax.annotate("", end, start, arrowprops=style | dict(connectionstyle=f"arc3,rad={bend}"))

    side, above = WIDTH / 2 + 0.03, HEIGHT / 2 + 0.03
    for column in range(4):
        left, right = APART * column + side, APART * (column + 1) - side
        arrow((left, 0), (right, 0))
        arrow((right, -2.6), (left, -2.6))
    arrow((4 * APART, -above), (4 * APART, -2.6 + above))
    arrow((4 * APART, above), (APART, above), bend=0.16)
    ax.text(2.5 * APART, 1.1, AGAIN, ha="center", fontsize=8.8, weight="bold")
    ax.text(-WIDTH / 2, -1.3, "how the step\nis computed:", va="center", fontsize=8.8, weight="bold")

    ax.set(xlim=(-WIDTH / 2 - 0.1, 4 * APART + WIDTH / 2 + 0.1), ylim=(-3.15, 1.4))
    ax.axis("off")
    fig.suptitle(TITLE, x=0.01, ha="left", weight="bold")
    fig.savefig(path, metadata={"Description": words()}, pil_kwargs={"optimize": True})
    plt.close(fig)

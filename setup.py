"""Package facts come from settings.ini, which nbdev reads too. A wheel carries what learn mode needs."""

import json
import posixpath
import re
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]


def on_the_web(text: str, folder: str = "") -> str:
    "A text of this folder whose relative links lead into the repository: elsewhere they lead nowhere."

    def moved(link: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        kind = "raw" if path.endswith(".png") else "blob"  # a picture itself, or the page about a file
        return f"]({cfg['git_url']}/{kind}/{cfg['branch']}/{path})"

    return re.sub(r"\]\((?!https?:|#|attachment:|data:)([^)\s]+)\)", moved, text)


def without_outputs(page: Path) -> str:
    "A notebook's text without its outputs, and with links that hold anywhere."
    nb = json.loads(page.read_text(encoding="utf-8"))
    folder = page.parent.relative_to(here).as_posix()
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
        else:
            cell["source"] = on_the_web("".join(cell["source"]), folder)
    return json.dumps(nb, ensure_ascii=False)


def write_book(out: Path) -> None:
    "What tinygpt.learn reads: numbered pages without outputs, tests, and the records that both show."
    shutil.rmtree(out, ignore_errors=True)
    for page in [*here.glob("nbs/[0-9]*.ipynb"), *here.glob("nbs/more/[0-9]*.ipynb")]:
        copy = out / page.relative_to(here)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(without_outputs(page), encoding="utf-8")
    others = [*here.glob("tests/*.py"), *here.glob("tests/*.json"), *here.glob("benchmarks/results/*.json")]
    for path in [here / "README.md", *others]:
        copy = out / path.relative_to(here)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


class BuildWithBook(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # a checkout has the book itself
            write_book(Path(self.build_lib) / "tinygpt/_book")


setup(
    version=cfg["version"],
    description=cfg["description"],
    long_description=on_the_web((here / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    project_urls={
        "Source": cfg["git_url"],
        "Book": cfg["doc_host"] + cfg["doc_baseurl"],
        "Changes": f"{cfg['files_url']}/CHANGELOG.md",
        "Issues": f"{cfg['git_url']}/issues",
        "Discussions": f"{cfg['git_url']}/discussions",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Framework :: Jupyter",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Education",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["tinygpt", "tinygpt.*"]),
    package_data={"tinygpt": ["py.typed"]},
    cmdclass={"build_py": BuildWithBook},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        key.removesuffix("_requirements"): cfg[key].split() for key in cfg if key.endswith("_requirements")
    },
    entry_points={"console_scripts": cfg["console_scripts"].split()},
)

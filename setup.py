"""Package facts come from settings.ini, which nbdev reads too."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

# a link that is relative here leads nowhere on PyPI
there = f"{cfg['git_url']}/blob/{cfg['branch']}/"
readme = re.sub(r"\]\((?!https?:|#)", f"]({there}", (here / "README.md").read_text(encoding="utf-8"))

setup(
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme,
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    project_urls={
        "Source": cfg["git_url"],
        "Book": cfg["doc_host"] + cfg["doc_baseurl"],
        "Changes": f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md",
        "Issues": f"{cfg['git_url']}/issues",
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
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        key.removesuffix("_requirements"): cfg[key].split() for key in cfg if key.endswith("_requirements")
    },
    entry_points={"console_scripts": cfg["console_scripts"].split()},
)

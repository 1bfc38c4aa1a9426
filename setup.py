"""Package facts come from settings.ini, which nbdev reads too."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
readme = here / "README.md"

setup(
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    url=cfg["git_url"],
    packages=find_packages(include=["tinygpt", "tinygpt.*"]),
    package_data={"tinygpt": ["py.typed"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        key.removesuffix("_requirements"): cfg[key].split() for key in cfg if key.endswith("_requirements")
    },
    entry_points={"console_scripts": cfg["console_scripts"].split()},
)

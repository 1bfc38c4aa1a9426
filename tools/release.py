"""A release: `prepare` its files, and print the `notes` of a tag.

python tools/release.py prepare      after the version was changed in settings.ini: CHANGELOG.md, CITATION.cff
python tools/release.py notes v0.1.0 what CHANGELOG.md says of it; an error if the tag is not this version
"""

import argparse
import datetime
import re
import sys

from pages import ROOT, settings

UNRELEASED = "## Unreleased\n"


def notes(changes: str, version: str) -> str:
    "The section of a version in the text of CHANGELOG.md; empty if it has none."
    found = re.search(rf"^## {re.escape(version)}, [-\d]+\n(.*?)(?=^## |\Z)", changes, re.M | re.S)
    return found[1].strip() if found else ""


def released(changes: str, version: str, day: str) -> str:
    "CHANGELOG.md with what was unreleased under this version."
    return changes.replace(UNRELEASED, f"{UNRELEASED}\n## {version}, {day}\n", 1)


def cited(text: str, version: str, day: str) -> str:
    "CITATION.cff with version, day and address."
    for key, value in (("version", version), ("date-released", day), ("url", settings()["git_url"])):
        text = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.M)
    return text


def prepare(version: str) -> None:
    changes, citation = ROOT / "CHANGELOG.md", ROOT / "CITATION.cff"
    day = str(datetime.date.today())
    text = changes.read_text(encoding="utf-8")
    if notes(text, version):
        sys.exit(f"CHANGELOG.md has a section {version} already: raise the version in settings.ini")
    changes.write_text(released(text, version, day), encoding="utf-8", newline="\n")
    text = citation.read_text(encoding="utf-8")
    citation.write_text(cited(text, version, day), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="what", required=True)
    sub.add_parser("prepare")
    sub.add_parser("notes").add_argument("tag")
    args = parser.parse_args()
    version = settings()["version"]
    if args.what == "prepare":
        return prepare(version)
    if args.tag != f"v{version}":
        sys.exit(f"the tag is {args.tag}, and settings.ini has version {version}")
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    print(text or sys.exit(f"CHANGELOG.md has no section {version}: run tools/release.py prepare"))


if __name__ == "__main__":
    main()

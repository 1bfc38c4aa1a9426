"""Look through the built site: dead links, pictures without words, requests to other hosts."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"img", "script", "source", "iframe"}  # what is at their src
LOADING_RELS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch"}


class Page(HTMLParser):
    "What a page links to, what it loads, and the places in it that a link may name."

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.loads, self.problems = set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag in LOADS and attrs.get("src"):
            self.loads.append(attrs["src"])
        if tag == "link" and LOADING_RELS & set((attrs.get("rel") or "").split()):
            self.loads.append(attrs["href"])
        if tag == "img" and not attrs.get("alt"):
            self.problems.append(f"a picture without words: {attrs.get('src')}")


def problems(folder: Path) -> list[str]:
    "What is wrong in the site that lies in `folder`; nothing, if all is well."
    pages = {
        path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))
    }
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        found += [f"{name}: {problem}" for problem in page.problems]
        for address in page.loads:
            if urlsplit(address).netloc:
                found.append(f"{name}: loads {address} from another host")
        for address in dict.fromkeys([*page.links, *page.loads]):
            if why := dead(address, path, pages):
                found.append(f"{name}: {address}: {why}")
    return found


def dead(address: str, path: Path, pages: dict[Path, Page]) -> str:
    "Why an address within the site leads nowhere; nothing, if it leads somewhere or to another host."
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "no such file"
    wanted = unquote(parts.fragment)
    if wanted and target in pages and wanted not in pages[target].ids:
        return "no such place on the page"
    return ""

"""Sphinx's EPUB, with the two things mended that epubcheck finds in it."""

import re

from sphinx.builders.epub3 import Epub3Builder

PAGE = re.compile(r'(<item [^>]*href="([^"]+\.xhtml)"[^>]*application/xhtml\+xml")( />)')


class Ebook(Epub3Builder):
    def add_css_file(self, filename: str, **attributes):
        "All but the style of myst-nb, which comes too late to be packed, and whose rules few readers know."
        if not filename.startswith("mystnb."):
            super().add_css_file(filename, **attributes)

    def build_content(self):
        super().build_content()
        manifest = self.outdir / "content.opf"
        text = PAGE.sub(self.with_properties, manifest.read_text(encoding="utf-8"))
        manifest.write_text(text, encoding="utf-8")

    def with_properties(self, item: re.Match) -> str:
        "A page's line of the manifest; a page with formulas has to say so."
        page = (self.outdir / item[2]).read_text(encoding="utf-8")
        return f'{item[1]} properties="mathml"{item[3]}' if "<math" in page else item[0]


def setup(app):
    app.add_builder(Ebook, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

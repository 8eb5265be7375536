"""A hook of mkdocs: the first use of each of our words on a page becomes a link to the glossary.

Only prose is changed: not headings, tables, code, figures or what is a link already.
"""

import re
from typing import Any

# word in the text -> its anchor in docs/glossary.md
WORDS = {
    "sim": "sim",
    "site": "site",
    "sites": "site",
    "encoding": "encoding",
    "encodings": "encoding",
    "zero point": "zero-point",
    "zero points": "zero-point",
    "scale": "scale",
    "scales": "scale",
    "granularity": "granularity",
    "tied": "tie",
    "supergroup": "supergroup",
    "dialect": "dialect",
    "integer-only": "integer-only",
    "Q/DQ": "q-dq",
    "LSB": "lsb",
    "SQNR": "sqnr",
    "parity": "parity",
    "coverage": "coverage",
    "frozen": "frozen",
    "verb": "verb",
    "verbs": "verb",
    "second moments": "second-moments",
}
LEFT_ALONE = {"glossary.md", "changelog.md", "index.md"}
_PROTECTED = re.compile(r"(`[^`]*`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>)")
_NO_PROSE = ("#", "|", "!", ":::", "--8<--", "    ")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with the links."""
    source = page.file.src_uri
    if source in LEFT_ALONE:
        return markdown
    glossary = "../" * source.count("/") + "glossary.md"
    lines, left, fenced = [], dict(WORDS), False
    for line in markdown.splitlines():
        fenced ^= line.lstrip().startswith("```")
        prose = not fenced and not line.startswith(_NO_PROSE) and not line.startswith("```")
        lines.append(_linked(line, left, glossary) if prose else line)
    return "\n".join(lines)


def _linked(line: str, left: dict[str, str], glossary: str) -> str:
    """Return a line with links at the words that are left, and take those that it has, in any form, out of them."""
    for word, anchor in list(left.items()):
        parts = _PROTECTED.split(line)
        for number in range(0, len(parts), 2):  # every second part is protected
            link = f"[{word}]({glossary}#{anchor})"
            linked, count = re.subn(rf"(?<![\w-]){word}(?![\w-])", link, parts[number], count=1)
            if count and word in left:
                parts[number] = linked
                for same in [other for other, target in left.items() if target == anchor]:
                    del left[same]
                line = "".join(parts)
    return line

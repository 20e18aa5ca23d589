"""List the links of the built site to places outside, with the pages that have them: `python docs/site/links.py`.

Sphinx checks links inside at every build. `python -m sphinx -b linkcheck docs build/links` visits those outside.
"""

import html
import re
import sys
from collections import defaultdict
from pathlib import Path

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
LINK = re.compile(r'<a class="[^"]*reference external[^"]*" href="(https?://[^"#]+)')


def outside(site: Path) -> dict[str, list[str]]:
    """Return the pages of a site that link to each address outside."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(site.rglob("*.html")):
        for link in dict.fromkeys(LINK.findall(path.read_text())):
            found[html.unescape(link)].append(str(path.relative_to(site)))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    for link, pages in outside(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE).items():
        print(link, *pages)

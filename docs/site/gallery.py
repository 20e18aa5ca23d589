"""The gallery of real runs: `python docs/site/gallery.py` runs the commands of docs/gallery/index.md, and writes it.

It takes 17 minutes on two quiet cores, so no build and no test runs it. The studies' figures are copied next to the
page. FOLDER keeps the studies' runs, so that an interrupted call goes on:

    python docs/site/gallery.py FOLDER
"""

import shutil
import sys
from pathlib import Path

from outputs import REPOSITORY, checkout, with_outputs, without_names

GALLERY = REPOSITORY / "docs" / "gallery"
FILES = {"batch-size.svg": "batch-size/figure-1.svg", "momentum.svg": "momentum/figure-1.svg"}
"""Files next to the page, and what they are copies of."""


def main() -> None:
    """Run the commands, and write the page and its files."""
    folder, page = Path(sys.argv[1]).absolute(), (GALLERY / "index.md").read_text()
    if not folder.exists():
        folder.mkdir(parents=True)
        (checkout(folder) / "tests").symlink_to(REPOSITORY / "tests")
    page = with_outputs(page, folder, hosts=False)
    (GALLERY / "index.md").write_text(page)
    for name, source in FILES.items():
        shutil.copy(folder / source, GALLERY / name)
    report = (folder / "compare" / "report.html").read_text()
    (GALLERY / "report.html").write_text(without_names(report, folder))


if __name__ == "__main__":
    main()

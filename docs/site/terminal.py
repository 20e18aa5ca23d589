"""Draw docs/terminal.svg, a real terminal: `python docs/site/terminal.py` runs the commands and records them."""

import io
import tempfile
from pathlib import Path

import outputs
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

FILE = outputs.REPOSITORY / "docs" / "terminal.svg"
LOOP = outputs.REPOSITORY / "examples" / "pytorch_loop.py"
AVERAGE = "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())"
"""Step that is left out of a copy of that loop, for the last command to find."""
COMMANDS = (
    "horovodrun -np 2 python pytorch/train.py --epochs 3 --global-batch-size 64 --seed 1",
    "horovodrun -np 2 python tensorflow/train.py --epochs 3 --global-batch-size 64 --seed 1",
    "allstep prove my_loop.py",
)
WIDTH = 136
COLOURS = {"ground": (24, 27, 33), "text": (216, 220, 226), "command": (126, 200, 255)}
THEME = TerminalTheme(COLOURS["ground"], COLOURS["text"], [COLOURS["ground"]] * 8)
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px}}
.{unique_id}-title {{font: bold 18px sans-serif}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's format without its web font, which a page without a network could not load."""


def picture(folder: Path) -> str:
    """Run the commands in a copy of the checkout, and return a terminal with them and what they print."""
    text = LOOP.read_text()
    assert text.count(AVERAGE) == 1
    (folder / "my_loop.py").write_text(text.replace(AVERAGE, "pass"))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in COMMANDS:
        console.print(Text(f"$ {command}", style="bold rgb({},{},{})".format(*COLOURS["command"])))
        printed = outputs.output(f"{command} 2>&1 || test $? = 1", folder)
        console.print(Text(printed.replace("[1,0]<stdout>:", "").replace("[1,0]<stderr>:", "")))
    return console.export_svg(title="allstep", theme=THEME, unique_id="terminal", code_format=FORMAT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(picture(outputs.checkout(Path(folder))))

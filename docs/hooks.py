"""What the site needs beyond the pages: figures that lie beside the experiments, and no marks of docs/make.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
UNIT = r"(?<=\d) (?=ms|GiB|MiB|%|±)|(?<=±) (?=\d)"  # a number and its unit stay on one line of a table


def on_files(files: Any, config: Any) -> Any:
    for path in sorted((ROOT / "experiments").glob("*/*.png")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    text = re.sub(r"<!-- [^\n]*? -->", "", markdown).replace("](../experiments/", "](experiments/")
    return re.sub(r"^\|.*", lambda row: re.sub(UNIT, "\N{NO-BREAK SPACE}", row[0]), text, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Wide tables scroll by themselves."""
    return html.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")

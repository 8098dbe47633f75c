"""A headless Chromium, where one is installed: what a page looks like and does in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

PATH = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(PATH is None, reason="there is no chromium here")

_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_PROBE = """
<script>
addEventListener("load", () => {
  const done = (value) => {
    const out = document.createElement("pre");
    out.id = "probe";
    out.textContent = JSON.stringify(value);
    document.body.append(out);
  };
  try { done((() => { %s })()); } catch (error) { done({error: String(error)}); }
});
</script>
"""


def ask(page: Path, script: str, width: int = 1200, *extra: str) -> Any:
    """What the body of a function, `script`, returns in the page, in a frame of that width in pixels.

    The frame: a headless window is not made narrower than 500 pixels.
    """
    assert PATH is not None
    text = page.read_text(encoding="utf-8").replace("</body>", _PROBE % script + "</body>")
    with tempfile.TemporaryDirectory() as folder:
        inner, outer = Path(folder) / "inner.html", Path(folder) / "outer.html"
        inner.write_text(text, encoding="utf-8")
        outer.write_text(
            f'<body style="margin:0"><iframe id="f" style="border:0;width:{width}px;height:3000px" '
            f'srcdoc="{html.escape(text)}"></iframe><script>addEventListener("load", () => setTimeout(() => '
            'document.body.append(document.getElementById("f").contentDocument.getElementById("probe")), 300));'
            "</script></body>",
            encoding="utf-8",
        )
        command = [PATH, *_QUIET, f"--user-data-dir={folder}/data", "--virtual-time-budget=4000", "--dump-dom", *extra]
        done = subprocess.run([*command, outer.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    answer = json.loads(html.unescape(found.group(1)))
    assert not (isinstance(answer, dict) and "error" in answer), answer
    return answer

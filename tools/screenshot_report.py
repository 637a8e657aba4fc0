"""Looks at a report in a real browser: at two widths, light and dark, and in print; fails where the page overflows.

pip install playwright
python tools/screenshot_report.py runs/evaluation/report.html --out build/screenshots [--chromium /usr/bin/chromium]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")

PROBLEMS = """() => {
  const said = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth)
    said.push(`the page is ${root.scrollWidth} wide, the window ${root.clientWidth}`);
  const clipped = element => element.closest(".scroll") !== null;
  for (const element of document.querySelectorAll("body *")) {
    const box = element.getBoundingClientRect();
    if (box.right > root.clientWidth + 1 && !clipped(element) && !element.closest("svg"))
      said.push(`<${element.tagName.toLowerCase()} class="${element.className}"> ends at ${Math.round(box.right)}`);
  }
  for (const svg of document.querySelectorAll(".panels svg")) {
    const frame = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1) said.push(`"${text.textContent}" leaves its plot`);
    }
    const smallest = Math.min(...[...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect().height));
    if (smallest < 8) said.push(`text of ${smallest.toFixed(1)} px in a plot`);
  }
  return [...new Set(said)];
}"""
"""What is wrong with the page as it stands."""


def look(browser: Any, page_path: Path, out: Path) -> list[str]:
    """Take all pictures into a folder; what is wrong, each with where."""
    problems: list[str] = []
    for scheme in SCHEMES:
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("pageerror", lambda error: problems.append(f"script: {error}"))  # noqa: B023
            page.goto(page_path.resolve().as_uri())
            problems += [f"{width} px, {scheme}: {problem}" for problem in page.evaluate(PROBLEMS)]
            page.screenshot(path=out / f"{width}-{scheme}.png", full_page=True)
            page.close()
    page = browser.new_page()
    page.goto(page_path.resolve().as_uri())
    page.pdf(path=out / "print.pdf", prefer_css_page_size=True, print_background=True)
    return problems


def main() -> int:
    """Look, and say what is wrong."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/screenshots"))
    parser.add_argument("--chromium", help="path of an installed Chromium; by default Playwright's own")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        problems = look(browser, arguments.page, arguments.out)
        browser.close()
    print("\n".join(problems) or f"nothing overflows; pictures in {arguments.out}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks the pages of a built site: `python docs/check_site.py build/docs/html [--screenshots
FOLDER]`.

Checks the spelling of handwritten pages (codespell, with accepted words in docs/spelling.txt) and
the links within the site, including anchors. Then opens every page in a headless Chromium, at phone
width (390 px) and desktop width, light and dark: no page may be wider than the screen, text must
have enough contrast, no page may request another host, and no script may fail. Without a browser it
says so and skips these checks.
"""

import argparse
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SIZES = {"phone": (390, 844), "desk": (1280, 900)}
SHOWN = ("index", "start/index", "start/first_steps", "howto/index", "howto/tables_in_files",
         "reference/index", "reference/losses", "reference/generated/xsoftmax.SampledSoftmaxLoss",
         "reference/cpp/losses", "reference/operators", "benchmarks/index", "experiments/index",
         "experiments/midx_words", "experiments/pecos_linear", "choose/index", "choose/sampler",
         "tutorials/index", "tutorials/recommender", "benchmarks/training_step",
         "howto/distributed", "howto/cuda")

# Finds elements that are wider than the screen and do not scroll, and text contrast by WCAG 2.
LOOK = r"""() => {
  const width = document.documentElement.clientWidth, wide = [];
  const clips = ['auto', 'scroll', 'hidden', 'clip'];
  const scrolls = element => {
    for (let e = element; e && e !== document.body; e = e.parentElement) {
      if (clips.includes(getComputedStyle(e).overflowX)) return true;
    }
    return false;
  };
  const start = (element, count) => element.textContent.trim().slice(0, count);
  if (document.documentElement.scrollWidth > width) {
    for (const e of document.querySelectorAll('body *')) {
      if (e.getBoundingClientRect().right > width + 1 && !scrolls(e) && wide.length < 3) {
        const name = e.className ? '.' + String(e.className).split(' ')[0] : '';
        wide.push(e.tagName.toLowerCase() + name + ': ' + start(e, 50));
      }
    }
  }
  const numbers = text => (text.match(/[\d.]+/g) || []).map(Number);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = rgb => {
    const [r, g, b] = rgb.slice(0, 3).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const names = ['p', 'td', 'th', 'li', 'a', 'pre span', 'code span', 'dt'];
  const texts = names.map(e => `article ${e}`);
  for (const e of document.querySelectorAll(texts.join(', '))) {
    const style = getComputedStyle(e);
    if (!e.textContent.trim() || faint.length > 2 || !e.offsetParent) continue;
    if (style.userSelect === 'none') continue;
    const both = [luminance(numbers(style.color)), luminance(behind(e))];
    const [a, b] = both.sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.4) {
      const where = e.tagName.toLowerCase() + '.' + e.className;
      faint.push(contrast.toFixed(1) + ' ' + where + ': ' + start(e, 40));
    }
  }
  return {over: document.documentElement.scrollWidth - width, wide, faint};
}"""


class Page(HTMLParser):
    """The anchors and links of a page."""
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes) -> None:
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        link = found.get("href") or found.get("src")
        if link:
            self.links.append(link)


def spelling() -> list[str]:
    generated = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "docs"], cwd=ROOT,
        capture_output=True, text=True).stdout
    pages = [
        path for path in [ROOT / "README.md", *DOCS.rglob("*.md"), *DOCS.rglob("*.rst")]
        if str(path.relative_to(ROOT)) not in generated.split()
    ]
    command = [
        sys.executable, "-m", "codespell_lib", "--ignore-words",
        str(DOCS / "spelling.txt"), *map(str, pages)
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return [f"spelling: {line.removeprefix(str(ROOT) + '/')}"
            for line in done.stdout.splitlines()] + done.stderr.splitlines()


def links(site: Path) -> list[str]:
    pages, problems = {
        path: Page(path)
        for path in site.rglob("*.html") if "_static" not in path.parts
    }, []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                problems.append(f"link: {path.relative_to(site)} leads to {link}, which is not "
                                "there")
            elif parts.fragment and target in pages and unquote(
                    parts.fragment) not in pages[target].anchors:
                problems.append(f"link: {path.relative_to(site)} leads to {link}, whose anchor is "
                                "not there")
    return sorted(set(problems))


def look(site: Path, screenshots: Path | None) -> list[str]:
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("check_site: no Chromium here, so no page was looked at in a browser")
        return []
    from playwright.sync_api import sync_playwright

    problems = []
    pages = sorted(path for path in site.rglob("*.html")
                   if "_static" not in path.parts and "_modules" not in path.parts)
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = chromium.new_context(color_scheme=scheme)
            tab, asked = context.new_page(), []
            tab.route("http*://**", lambda route:
                      (asked.append(f"asks {route.request.url}"), route.abort()))
            tab.on("pageerror", lambda error: asked.append(f"a script fails: {error}"))
            for path in pages:
                name = str(path.relative_to(site)).removesuffix(".html")
                if scheme == "dark" and "generated/" in name and name not in SHOWN:
                    continue  # the same colours as others
                asked.clear()
                tab.set_viewport_size(dict(zip(("width", "height"), SIZES["phone"])))
                tab.goto(path.as_uri(), wait_until="load")
                for size, (width, height) in SIZES.items():
                    tab.set_viewport_size({"width": width, "height": height})
                    found = tab.evaluate(LOOK)
                    if found["over"] > 0:
                        problems.append(f"browser: {name} is {found['over']} px too wide on a "
                                        f"{size} of {width}: {'; '.join(found['wide'])}")
                    if size == "desk":
                        problems += [
                            f"browser: {name}, {scheme}: text of contrast {text}"
                            for text in found["faint"]
                        ]
                    if screenshots and name in SHOWN:
                        screenshots.mkdir(parents=True, exist_ok=True)
                        tab.screenshot(path=str(screenshots /
                                                f"{name.replace('/', '-')}-{size}-{scheme}.png"))
                problems += [f"browser: {name} {text}" for text in asked]
        chromium.close()
    print(f"check_site: {len(pages)} pages in {Path(browser).name}, at "
          f"{' and '.join(str(width) for width, _ in SIZES.values())} px")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of some pages")
    args = parser.parse_args()
    site = args.site.resolve()
    problems = spelling() + links(site) + look(site, args.screenshots)
    print(*problems, sep="\n", end="\n" if problems else "")
    if problems:
        sys.exit(f"check_site: {len(problems)} problems")
    print("check_site: spelling, links and pages are right")


if __name__ == "__main__":
    main()

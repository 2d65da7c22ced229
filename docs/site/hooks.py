"""What the site changes in the pages, so that they read well in the repository too.

README.md is the first page. A link that leaves docs/ leads to the file in the repository; without an address its
words are left. Beside each page lies its Markdown, and llms.txt lists these files, for readers that are programs
(llmstxt.org).
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """The first page is the README."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown, page, config, **_):
    """Links as they are on the site."""
    folder = ROOT if page.file.src_uri == "index.md" else (ROOT / "docs" / page.file.src_uri).parent

    def replaced(found):
        target = _target(folder / found[2], page, config)
        return f"[{found[1]}]({target}{found[3] or ''})" if target else found[1]

    parts = CODE.split(markdown)  # prose, code, prose, ...
    page.as_text = "".join(part if number % 2 else LINK.sub(replaced, part) for number, part in enumerate(parts))
    return page.as_text


def on_post_page(output, page, config):
    """The page as Markdown: guide.md beside guide/index.html."""
    target = Path(config["site_dir"], page.file.src_uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.as_text)
    return output


def on_nav(nav, config, **_):
    """The list of all pages, by the sections of the site."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section in nav.items:
        lines += ["", f"## {section.title}", ""]
        lines += [f"- [{page.title}]({page.file.src_uri})" for page in section.children or ()]
    Path(config["site_dir"]).mkdir(parents=True, exist_ok=True)
    config.llms_txt = "\n".join(lines) + "\n"
    return nav


def on_post_build(config):
    """Written last, as a build begins with an empty folder."""
    Path(config["site_dir"], "llms.txt").write_text(config.llms_txt)


def _target(path, page, config):
    """Of a link to a file: another page or picture of the site, or the file in the repository, which may be nowhere."""
    path = path.resolve()
    docs = ROOT / "docs"
    if path == ROOT / "README.md":
        return _relative("index.md", page)
    if path.is_relative_to(docs) and path.suffix in (".md", ".png", ".svg"):
        return _relative(path.relative_to(docs).as_posix(), page)
    if not config["repo_url"]:
        return ""
    inside = path.relative_to(ROOT).as_posix()
    return f"{config['repo_url']}/{'tree' if path.is_dir() else 'blob'}/main/{inside}"


def _relative(uri, page):
    return "../" * page.file.src_uri.count("/") + uri

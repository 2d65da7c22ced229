#!/usr/bin/env bash
# docs/site.png: two pages of the site, wide and narrow, by Chromium. Builds the site.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
NO_MKDOCS_2_WARNING=1 "$here/../.venv/bin/mkdocs" build --quiet --strict --config-file "$here/../mkdocs.yml" \
  --site-dir "$folder/site"
{
  echo '<style>body{margin:0;transform:scale(.5);transform-origin:0 0;width:1850px;background:#888}iframe{border:0;height:1000px}'
  echo 'div{display:flex;justify-content:space-between;padding-bottom:20px}</style>'
  for page in index.html cluster/index.html; do
    [ -e "$folder/site/$page" ]
    echo "<div><iframe src='site/$page' style='width:1440px'></iframe><iframe src='site/$page' style='width:390px'></iframe></div>"
  done
} >"$folder/pages.html"
"$here/picture.sh" "file://$folder/pages.html" "$here/site.png" 925,1020

#!/usr/bin/env bash
# docs/report.png: the upper part of a run's report, by Chromium. docs/report_screenshot.sh RUN_DIR
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
page=$(cd "$1" && pwd)/report.html
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"${CHROMIUM:-chromium}" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
  --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile" --virtual-time-budget=20000 \
  --window-size=1100,2340 --screenshot="$here/report.png" "file://$page"

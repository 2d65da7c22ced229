#!/usr/bin/env bash
# docs/report.png: the upper part of a run's report, by Chromium. docs/report_screenshot.sh RUN_DIR
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/picture.sh" "file://$(cd "$1" && pwd)/report.html" "$here/report.png" 1100,2720

#!/usr/bin/env bash
# screenshot.sh [URL [PNG]]: a picture of the page of a run, taken with Chromium from a Prometheus that is running
set -euo pipefail
docs=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../docs" && pwd)
"$docs/picture.sh" "${1:-http://localhost:9090/consoles/straggle.html?range=300}" "${2:-$docs/console.png}" 1300,1428

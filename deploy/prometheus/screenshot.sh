#!/usr/bin/env bash
# screenshot.sh [URL [PNG]]: a picture of the page of a run, taken with Chromium from a Prometheus that is running
set -euo pipefail
url=${1:-http://localhost:9090/consoles/straggle.html?range=300}
png=${2:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/../../docs/console.png}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
  --disable-component-update --disable-sync --user-data-dir="$profile" --hide-scrollbars --virtual-time-budget=8000 \
  --window-size=1300,1428 --screenshot="$png" "$url"

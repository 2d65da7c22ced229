#!/usr/bin/env bash
# docs/picture.sh URL PNG WIDTH,HEIGHT: a picture of a page, by Chromium, after eight seconds of the page's own time
set -euo pipefail
mapfile -t flags <"$(dirname "${BASH_SOURCE[0]}")/chromium.flags"
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"${CHROMIUM:-chromium}" "${flags[@]}" --user-data-dir="$profile" --virtual-time-budget=8000 --window-size="$3" \
  --screenshot="$2" "$1"

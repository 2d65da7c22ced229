#!/usr/bin/env bash
# docs/compose.png: the page of the cluster of docker/ after three minutes, by Chromium. Starts the cluster and ends it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
port=${PROMETHEUS_PORT:-19390}
compose() { PROMETHEUS_PORT=$port KEYS=steps=100000 docker compose -p straggle-picture -f "$here/../docker/docker-compose.yml" "$@"; }
trap 'compose down --volumes --timeout 2' EXIT
compose up --detach
sleep 180
"$here/../deploy/prometheus/screenshot.sh" "http://127.0.0.1:$port/consoles/straggle.html?range=300" "$here/compose.png"

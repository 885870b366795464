#!/usr/bin/env bash
# Opens a page or a picture in a headless browser and writes what is seen as PNG, to be looked at.
#
#     tools/screenshot.sh report.html report.png [WIDTHxHEIGHT]
#
# Fails where there is no browser, it cannot read the file, or a script of the page fails. Another browser than
# the first Chromium that is found: BROWSER=path/to/it.
set -euo pipefail

file="${1:?usage: tools/screenshot.sh FILE.html|FILE.svg OUT.png [WIDTHxHEIGHT]}"
out="${2:?usage: tools/screenshot.sh FILE.html|FILE.svg OUT.png [WIDTHxHEIGHT]}"
size="${3:-1200x2400}"
[ -r "$file" ] || { echo "$file cannot be read" >&2; exit 1; }

browser="${BROWSER:-}"
for name in chromium chromium-browser google-chrome chrome; do
    [ -n "$browser" ] || browser="$(command -v "$name" || true)"
done
[ -n "$browser" ] || { echo "no Chromium here: install one, or set BROWSER" >&2; exit 1; }

profile="$(mktemp -d)"
trap 'rm -rf "$profile"' EXIT
rm -f "$out"
# Its sandbox does not start for root, which containers run as; nothing is loaded from elsewhere.
log="$("$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile" \
    --host-resolver-rules="MAP * ~NOTFOUND" --enable-logging=stderr --window-size="${size/x/,}" \
    --screenshot="$out" "file://$(realpath "$file")" 2>&1)" || { echo "$log" >&2; exit 1; }
if grep -E "CONSOLE|ERR_|parser ?error" <<<"$log" >&2; then
    echo "$file does not load without errors" >&2
    exit 1
fi
[ -s "$out" ] || { echo "$log" >&2; exit 1; }
echo "$out"

#!/usr/bin/env bash
# Installs Debian's chromium for tests/browser, if no browser is there: called by make test and by .ci/run.
# Fails, with the reason, where it cannot: make test then skips those tests, and .ci/run stops.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done

fail() {
    printf 'browser: tests/browser needs chromium: %s\n' "$*" >&2
    exit 1
}
command -v apt-get >/dev/null || fail "install it; there is no apt-get to do it."
[ "$(id -u)" -eq 0 ] || fail "apt-get install chromium (as root)."

printf 'browser: installing chromium\n'
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install --yes --no-install-recommends chromium fonts-inter; } >/dev/null ||
    fail "apt-get could not install it (see above)."

#!/bin/sh
# Debian packages that `make bench` measures beside us or needs to measure. Installs what is missing where it can
# (root and apt); otherwise says what is missing, and bench/run.py leaves out the rows that need it.
set -eu
say() { printf 'exeat: %s\n' "$*" >&2; }
missing=''
need() { [ -e "$1" ] || command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need /usr/sbin/nginx nginx-light
need /usr/sbin/squid squid-openssl
need /usr/include/openssl/ssl.h libssl-dev
need cc gcc
need node nodejs
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing for the benchmark:$missing"
    # No service may be started by installing it: the benchmark runs its own, on ports and folders of its own.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    apt-get update -qq >/dev/null
    # shellcheck disable=SC2086  # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    say "the benchmark also uses:$missing (not installed here; its rows will be left out)"
fi

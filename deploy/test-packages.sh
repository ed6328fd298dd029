#!/bin/sh
# Debian packages that the integration tests drive as real clients and tools. Installs what is missing where it can
# (root and apt); otherwise says what is missing, and the tests that need it say so as well.
set -eu
say() { printf 'exeat: %s\n' "$*" >&2; }
missing=''
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need curl curl
need git git
need git-lfs git-lfs
need docker-registry docker-registry
need skopeo skopeo
need openssl openssl
need age age
need node nodejs
need npm npm
need gh gh
need bundle bundler
need twine twine
need pgrep procps
PATH="$PATH:/usr/sbin:/sbin" need ip iproute2
PATH="$PATH:/usr/sbin:/sbin" need nft nftables
# A corporate proxy that inspects TLS. Its package also starts a service on port 3128, so it is asked for only where no
# service manager runs; without it those tests say that they are skipped.
[ -d /run/systemd/system ] || PATH="$PATH:/usr/sbin:/sbin" need squid squid-openssl
# An origin that cuts requests in its own way; the same of its service, on port 80.
[ -d /run/systemd/system ] || PATH="$PATH:/usr/sbin:/sbin" need nginx nginx
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing for the tests:$missing"
    apt-get update -qq >/dev/null
    # shellcheck disable=SC2086  # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    say "the tests also use:$missing (not installed here; tests that need them will say so)"
fi

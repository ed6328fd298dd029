"""`DOCTOR`: the script at http://exeat.internal/doctor.sh: what `exeat doctor` asks, for sandboxes without Python.

POSIX sh, and curl for everything that connects. Documentation addresses only. Its result is a claim and arms nothing.
"""

from __future__ import annotations

from typing import Final

DOCTOR: Final = r"""#!/bin/sh
# Use: curl -fsS http://exeat.internal/doctor.sh | sh
code=0 found=''
# say CHECK STATE TEXT [LACKING]: LACKING are names of variables, quoted and with commas
say() {
  printf '%-8s %s\n' "$2" "$3"
  [ "$2" = holds ] || code=1
  found="$found${found:+,}{\"check\":\"$1\",\"state\":\"$2\"${4:+,\"lacks\":[$4]}}"
}

if ! command -v curl >/dev/null 2>&1; then
  echo 'unknown  curl is not installed, and nothing else here can be asked; use `exeat doctor` or exeat/doctor.py'
  exit 1
fi

direct() {
  curl -q --noproxy '*' -g -s -f -k -o /dev/null --connect-timeout 3 -m 5 "$3" 2>/dev/null
  case $? in
    0) say "$1" fails "$2 ($3): somebody answered" ;;
    28) say "$1" unknown "$2 ($3): no answer: dropped on the way, or lost outside; from here both look the same" ;;
    *) say "$1" holds "$2 ($3): it leads nowhere" ;;
  esac
}
direct direct 'a direct connection' https://192.0.2.1/
direct bare-address 'a bare address in clear text' http://198.51.100.1/
direct other-port 'another port (ssh)' http://203.0.113.1:22/
direct dot 'DNS over TLS' https://192.0.2.53:853/
direct direct-ipv6 'a direct connection by IPv6' 'https://[2001:db8::1]/'
if command -v nslookup >/dev/null 2>&1; then
  if nslookup -timeout=2 -retry=0 doctor.invalid 192.0.2.53 2>&1 | grep -qi 'timed out'; then
    say dns-udp unknown 'a DNS server of its own (192.0.2.53): no answer: dropped on the way, or lost outside'
  else
    say dns-udp holds 'a DNS server of its own (192.0.2.53): it leads nowhere, or lookups are caught'
  fi
fi

ca=$(curl -fsS -m 10 http://exeat.internal/ca.pem 2>/dev/null | sed -n '2p')
if [ -n "$ca" ]; then
  say gateway holds 'the gateway (http://exeat.internal/): reached'
else
  say gateway fails 'the gateway (http://exeat.internal/): not reached: http_proxy is missing or wrong'
fi

# Reached without any proxy variable: connections are captured here, and no client needs one.
captured=''
if [ -n "$ca" ] &&
  [ -z "${http_proxy:-}${HTTP_PROXY:-}${https_proxy:-}${HTTPS_PROXY:-}${all_proxy:-}${ALL_PROXY:-}" ]; then
  captured=yes
fi

wrong='' lacks=''
# one VARIABLE...: one of them must be set; a file must hold the gateway's CA
one() {
  case "$captured:$1" in
    yes:*proxy*|yes:*PROXY*) return ;;
  esac
  for name in "$@"; do
    eval "value=\${$name:-}"
    [ -n "$value" ] || continue
    case $name in
      *CERT*|*CA_*|*CAINFO*|*cafile*)
        if [ ! -r "$value" ]; then
          wrong="$wrong $name names a file that cannot be read;"
          lacks="$lacks${lacks:+,}\"$1\""
        elif [ -n "$ca" ] && ! grep -qF -e "$ca" "$value"; then
          wrong="$wrong $name names a file without the gateway's CA;"
          lacks="$lacks${lacks:+,}\"$1\""
        fi ;;
    esac
    return
  done
  wrong="$wrong $1 is missing;"
  lacks="$lacks${lacks:+,}\"$1\""
}
client() {
  command -v "$1" >/dev/null 2>&1 || return 1
  who=$1 wrong='' lacks=''
}
told() {
  if [ -z "$wrong" ]; then
    say "client-$who" holds "client $who: its variables are set"
  else
    say "client-$who" fails "client $who:${wrong%;}" "$lacks"
  fi
}
client curl && { one CURL_CA_BUNDLE SSL_CERT_FILE; one https_proxy; one http_proxy; told; }
client wget && { one SSL_CERT_FILE; one https_proxy; one http_proxy; told; }
client git && { one GIT_SSL_CAINFO; one https_proxy HTTPS_PROXY ALL_PROXY all_proxy; told; }
client gh && { one SSL_CERT_FILE; one https_proxy HTTPS_PROXY; told; }
client pip && { one PIP_CERT REQUESTS_CA_BUNDLE SSL_CERT_FILE; one https_proxy HTTPS_PROXY PIP_PROXY; told; }
client uv && { one SSL_CERT_FILE; one https_proxy HTTPS_PROXY ALL_PROXY; told; }
client python3 && { one SSL_CERT_FILE; one REQUESTS_CA_BUNDLE; one https_proxy HTTPS_PROXY; told; }
client aws && { one AWS_CA_BUNDLE REQUESTS_CA_BUNDLE; one https_proxy HTTPS_PROXY; told; }
client node && { one NODE_EXTRA_CA_CERTS; one NODE_USE_ENV_PROXY NODE_OPTIONS; one https_proxy HTTPS_PROXY; told; }
client npm && { one npm_config_cafile NODE_EXTRA_CA_CERTS; one npm_config_https_proxy https_proxy HTTPS_PROXY; told; }
client pnpm && { one npm_config_cafile NODE_EXTRA_CA_CERTS; one npm_config_https_proxy https_proxy HTTPS_PROXY; told; }
client yarn && { one YARN_HTTPS_CA_FILE_PATH NODE_EXTRA_CA_CERTS; one YARN_HTTPS_PROXY https_proxy HTTPS_PROXY; told; }
client go && { one SSL_CERT_FILE; one https_proxy HTTPS_PROXY; told; }
client cargo && { one CARGO_HTTP_CAINFO SSL_CERT_FILE; one CARGO_HTTP_PROXY https_proxy HTTPS_PROXY; told; }
client docker && { one SSL_CERT_FILE; one https_proxy HTTPS_PROXY; told; }
client java && { one JAVA_TOOL_OPTIONS; told; }
client mvn && { one JAVA_TOOL_OPTIONS; told; }
taken=''
if curl -fsS -m 10 -o /dev/null -H 'Content-Type: application/json' \
  -d "{\"version\":1,\"findings\":[$found]}" http://exeat.internal/doctor 2>/dev/null; then
  taken='; the gateway has taken note of it'
fi
printf '%-8s %s\n' claimed "this is what the sandbox says of itself; it arms no credential$taken"
exit $code
"""

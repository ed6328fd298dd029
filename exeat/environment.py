"""The variables that make unmodified clients use the gateway and trust its CA (`exeat env`, `exeat run`).

Three groups, from what each client was seen to read (docs/clients.md):

- proxy variables, in lower and upper case: curl, wget, apt and gRPC read only the lower, others either;
- CA variables that *add* to the client's roots get `ca.pem` (ours alone);
- CA variables that *replace* the client's roots get `bundle.pem` (the system's roots and ours).

Everything here replaces what was set before: a variable that pointed elsewhere is a client that fails.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Literal
from urllib.parse import urlsplit

Format = Literal["sh", "fish", "json", "dotenv", "docker", "k8s"]
FORMATS: tuple[Format, ...] = ("sh", "fish", "json", "dotenv", "docker", "k8s")

PROXY_VARIABLES = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "grpc_proxy",
    "YARN_HTTP_PROXY",
    "YARN_HTTPS_PROXY",
    "GLOBAL_AGENT_HTTP_PROXY",
    "GLOBAL_AGENT_HTTPS_PROXY",
    "CARGO_HTTP_PROXY",
    "PIP_PROXY",
    "npm_config_proxy",
    "npm_config_https_proxy",
)
ADDING_CA_VARIABLES = ("NODE_EXTRA_CA_CERTS", "DENO_CERT", "CODEX_CA_CERTIFICATE")
REPLACING_CA_VARIABLES = (
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "AWS_CA_BUNDLE",
    "npm_config_cafile",
    "YARN_HTTPS_CA_FILE_PATH",
    "CARGO_HTTP_CAINFO",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "HTTPLIB2_CA_CERTS",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "NIX_SSL_CERT_FILE",
    "BUNDLE_SSL_CA_CERT",
    "COMPOSER_CAFILE",
)
REMOVED_VARIABLES = ("SSL_CERT_DIR", "FTP_PROXY", "ftp_proxy", "RSYNC_PROXY", "GIT_SSH_COMMAND", "GIT_PROXY_COMMAND")
"""Set elsewhere they would undo the rest: SSL_CERT_DIR replaces Go's directories, the others go round the proxy."""


def node_preload() -> str:
    """The script that makes Node versions without proxy variables of their own use them (`node_preload` below)."""
    return files("exeat").joinpath("node_proxy.cjs").read_text("utf-8")


def client_environment(
    *,
    proxy_url: str,
    ca_file: str,
    bundle_file: str,
    java_trust_store: str | None = None,
    node_preload: str | None = None,
) -> dict[str, str]:
    """Return the variables for clients inside a sandbox.

    `proxy_url` is `http://[session:TOKEN@]host:port`; the files are paths as the sandbox sees them. `node_preload` is
    named only where the file is sure to be there: Node does not start without it.
    """
    url = urlsplit(proxy_url)
    host, port = url.hostname or "127.0.0.1", url.port or 3128
    variables = dict.fromkeys(PROXY_VARIABLES, proxy_url)
    variables |= dict.fromkeys(ADDING_CA_VARIABLES, ca_file)
    variables |= dict.fromkeys(REPLACING_CA_VARIABLES, bundle_file)
    # Loopback only: wider lists differ by client, and policy must never depend on them.
    variables |= {"NO_PROXY": "localhost,127.0.0.1,::1", "no_proxy": "localhost,127.0.0.1,::1"}
    variables |= {
        "NODE_USE_ENV_PROXY": "1",
        "GIT_HTTP_PROXY_AUTHMETHOD": "basic",  # git sends nothing before a challenge otherwise
        "GIT_TERMINAL_PROMPT": "0",
        "CARGO_NET_GIT_FETCH_WITH_CLI": "true",
        "CLOUDSDK_PROXY_TYPE": "http",
        "CLOUDSDK_PROXY_ADDRESS": host,
        "CLOUDSDK_PROXY_PORT": str(port),
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_HUB_DISABLE_XET": "1",
        "EXEAT": "1",
    }
    if url.username or url.password:
        variables |= {"CLOUDSDK_PROXY_USERNAME": url.username or "", "CLOUDSDK_PROXY_PASSWORD": url.password or ""}
    if java_trust_store:
        variables["JAVA_TOOL_OPTIONS"] = (
            f"-Dhttp.proxyHost={host} -Dhttp.proxyPort={port} -Dhttps.proxyHost={host} -Dhttps.proxyPort={port} "
            f"-Djavax.net.ssl.trustStore={java_trust_store} -Djavax.net.ssl.trustStoreType=PKCS12 "
            "-Djavax.net.ssl.trustStorePassword=changeit"
        )
    if node_preload:
        variables["NODE_OPTIONS"] = f"--require={node_preload}"
    git = [
        ("http.proxy", proxy_url),
        ("http.sslCAInfo", bundle_file),
        ("safe.directory", "*"),  # a work tree often belongs to another uid than the sandbox's
        # Clones by ssh would find no route; over https the same repository is judged.
        ("url.https://github.com/.insteadOf", "git@github.com:"),
        ("url.https://github.com/.insteadOf", "ssh://git@github.com/"),
    ]
    variables["GIT_CONFIG_COUNT"] = str(len(git))
    for index, (key, value) in enumerate(git):
        variables[f"GIT_CONFIG_KEY_{index}"] = key
        variables[f"GIT_CONFIG_VALUE_{index}"] = value
    return variables


def render(variables: Mapping[str, str], format: Format) -> str:
    """Return `variables` as text in `format`, sorted by name, with a final newline.

    Raises ValueError for a value with a line break in the docker format, which cannot hold one.
    """
    items = sorted(variables.items())
    match format:
        case "sh":
            return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in items)
        case "fish":
            return "".join(f"set -gx {name} {_fish(value)}\n" for name, value in items)
        case "json":
            return json.dumps(dict(items), indent=2) + "\n"
        case "dotenv":
            return "".join(f"{name}={_dotenv(value)}\n" for name, value in items)
        case "docker":  # docker run --env-file: no quoting, one per line
            for name, value in items:
                if "\n" in value or "\r" in value:
                    raise ValueError(f"{name} holds a line break, which a docker env file cannot")
            return "".join(f"{name}={value}\n" for name, value in items)
        case "k8s":  # quoted names too: YAML reads YES as a boolean; $( would refer to another variable
            return "".join(
                f"- name: {json.dumps(name)}\n  value: {json.dumps(value.replace('$', '$$'))}\n"
                for name, value in items
            )


def removals(format: Format) -> str:
    """Text to put before `render`: takes away REMOVED_VARIABLES where `format` is read by a shell, else nothing."""
    match format:
        case "sh":
            return f"unset {' '.join(REMOVED_VARIABLES)}\n"
        case "fish":
            return f"set -e {' '.join(REMOVED_VARIABLES)}\n"
        case "json" | "dotenv" | "docker" | "k8s":
            return ""


def _fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _dotenv(value: str) -> str:
    """Single quotes, which every reader takes literally; double ones only for what those cannot hold."""
    if not any(character in value for character in "'\\\r\n"):
        return f"'{value}'"
    escaped = json.dumps(value, ensure_ascii=False)
    return escaped.replace("$", "\\$")

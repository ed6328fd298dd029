"""The script that makes older Node versions use the proxy is named only where it is sure to exist."""

from __future__ import annotations

from exeat.environment import client_environment, node_preload


def test_without_a_preload_node_options_are_left_alone() -> None:
    """`exeat env` is for places that may lack the file, and Node does not start without a file that it requires."""
    variables = client_environment(proxy_url="http://127.0.0.1:3128", ca_file="/c", bundle_file="/b")
    assert "NODE_OPTIONS" not in variables


def test_a_preload_is_required_by_its_path() -> None:
    """Inside a boundary every Node process loads the script from where the boundary put it."""
    variables = client_environment(
        proxy_url="http://127.0.0.1:3128", ca_file="/c", bundle_file="/b", node_preload="/run/exeat/node-proxy.cjs"
    )
    assert variables["NODE_OPTIONS"] == "--require=/run/exeat/node-proxy.cjs"


def test_the_script_switches_nothing_off() -> None:
    """It makes connections by CONNECT; certificates are checked as Node checks them."""
    text = node_preload()
    assert "CONNECT" in text
    assert "rejectUnauthorized" not in text

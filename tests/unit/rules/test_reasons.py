"""The table of reasons: constant, complete, and safe to show."""

from __future__ import annotations

import re

from rules.reasons import _TABLE, REASONS, reason
from tests.support.rows import every_row

# RFC 9209 section 2.3: the registered proxy error types.
RFC_9209 = frozenset(
    "dns_timeout dns_error destination_not_found destination_unavailable destination_ip_prohibited "
    "destination_ip_unroutable connection_refused connection_terminated connection_timeout connection_read_timeout "
    "connection_write_timeout connection_limit_reached tls_protocol_error tls_certificate_error tls_alert_received "
    "http_request_error http_request_denied http_response_incomplete http_response_header_section_size "
    "http_response_header_size http_response_body_size http_response_trailer_section_size http_response_trailer_size "
    "http_response_transfer_coding http_response_content_coding http_response_timeout http_upgrade_failed "
    "http_protocol_error proxy_internal_response proxy_internal_error proxy_configuration_error "
    "proxy_loop_detected".split()
)


def test_an_unknown_code_is_an_internal_error() -> None:
    """A code that no row has is answered as our own fault, with 503, never as something permitted."""
    assert reason("no-such-code").code == "internal-error"
    assert reason("no-such-code").status == 503


def test_codes_are_unique() -> None:
    """Two rows never share a code, or one would hide the other."""
    assert len(REASONS) == len(_TABLE)


@every_row("code", sorted(REASONS))
def test_a_row_is_constant_text_with_registered_error_type(code: str) -> None:
    """Every row has a URL-safe code, an error status, a registered RFC 9209 type and text without placeholders."""
    row = REASONS[code]
    assert re.fullmatch(r"[a-z][a-z-]+[a-z]", row.code)
    assert 400 <= row.status < 600
    assert row.proxy_error in RFC_9209
    for text in (row.title, row.remedy, row.doc):
        assert text.isascii()
        assert "%" not in text
        assert "{" not in text
        assert text.endswith(".")
    assert row.type == f"http://exeat.internal/reasons/{code}"


def test_refusals_that_need_a_person_are_not_retryable() -> None:
    """An agent is never told to retry what only an operator, an approver or a corrected request can change."""
    for code in ("no-rule", "denied-by-rule", "approval-required", "bad-token", "placeholder-misuse", "bad-path"):
        assert not REASONS[code].retryable

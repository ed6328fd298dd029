"""Facts of one request to a body or head matcher, in one line of a test."""

from rules.facts import RequestFacts


def judged(
    method: str = "POST",
    target: str = "/",
    *headers: tuple[str, str],
    host: str = "api.example",
    content_type: str | None = None,
    body: bool | None = None,
) -> RequestFacts:
    """Facts of `method` `target` at `host` over https. `headers` are (lower-case name, value)."""
    typed = () if content_type is None else (("content-type", content_type),)
    return RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=None,
        target=f"https://{host}{target}",
        headers=(("host", host), *typed, *headers),
        has_body=method in ("POST", "PUT", "PATCH") if body is None else body,
    )

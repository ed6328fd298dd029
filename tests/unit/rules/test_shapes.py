"""Shapes of captures: one thing, one spelling; what is no such thing does not fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rules.shapes import SHAPES
from tests.support.properties import tried
from tests.support.rows import every_row


@every_row(
    ("shape", "text"),
    [
        ("crate-name", "-serde"),
        ("crate-name", "a/b"),
        ("crate-file", "serde.crate"),
        ("crate-file", "serde-1.crate"),
        ("crate-file", "serde-1.0.0.zip"),
        ("gem-file", "rails.gem"),
        ("gem-file", "rails-x.gem"),
        ("gem-file", "rails-7.2.1.exe"),
        ("gem-file", "-7.2.1.gem"),
        ("gem-json", "rails"),
        ("gem-json", "rails.json.json/x"),
        ("deb-file", "curl.deb"),
        ("deb-file", "curl_1_amd64.exe"),
        ("deb-file", "Curl_1_amd64.deb"),
        ("apk-file", "curl.apk"),
        ("apk-file", "curl-8.9.1.apk"),
        ("conda-file", "numpy-1.0.conda"),
        ("conda-file", "numpy-1.0-0.zip"),
        ("nuget-id", "a/b"),
        ("hf-name", "datasets"),
        ("hf-name", "resolve"),
        ("hf-name", "xet-write-token"),
        ("gitlab-project", "42"),
        ("gitlab-project", "acme"),
        ("gitlab-project", "acme/"),
        ("gitlab-project", "/acme/shop"),
        ("gitlab-project", "acme/-/shop"),
        ("gitlab-group", "42"),
        ("jira-issue", "10012"),
        ("jira-issue", "SHOP-"),
        ("jira-issue", "SHOP-12a"),
        ("uuid", "roadmap"),
        ("uuid", "1f2e3d4c5b6a79801a2b3c4d5e6f7a8"),
        ("uuid", "g" * 32),
        ("gemini-generate", "gemini-2.5-flash"),
        ("gemini-generate", "gemini-2.5-flash:batchGenerateContent"),
        ("gemini-generate", ":generateContent"),
        ("gemini-generate", "a:generateContent:generateContent"),
        ("google-file", "trash"),
        ("google-file", "generateIds"),
        ("google-mint", "a@b:unknown"),
        ("azure-container", "$web"),
        ("azure-container", "a--b"),
        ("telegram-bot", "bot:x"),
        ("rust-file", "index.html"),
        ("node-release", "npm"),
        ("conda-index", "secrets.json"),
        ("go-archive", "chrome.deb"),
        ("composer-file", "monolog.xml"),
        ("gradle-distribution", "other.zip"),
        ("hex-file", "phoenix.tar"),
        ("pub-name", "versions"),
    ],
)
def test_what_is_no_such_thing_does_not_fit(shape: str, text: str) -> None:
    """Expect None, so that a rule that binds the argument never sees it."""
    assert SHAPES[shape](text) is None


@every_row(
    ("shape", "text", "canonical"),
    [
        ("crate-name", "Serde_JSON", "serde-json"),
        ("crate-file", "serde_json-1.0.128.crate", "serde-json"),
        ("crate-file", "foo-1-2.0.0.crate", "foo-1"),
        ("gem-file", "rails-7.2.1.gem", "rails"),
        ("gem-file", "nokogiri-1.16.7-x86_64-linux-musl.gem", "nokogiri"),
        ("gem-file", "nokogiri-1.16.7-arm64-darwin-22.gem", "nokogiri"),
        ("gem-file", "jruby-openssl-0.15.1-java.gem", "jruby-openssl"),
        ("gem-file", "ruby-2d-0.12.1.gemspec.rz", "ruby-2d"),
        ("deb-file", "g++-12_12.2.0-14_amd64.deb", "g++-12"),
        ("deb-file", "openssl_3.0.15-1~deb12u1_amd64.deb", "openssl"),
        ("deb-file", "libxml2_2.9.14.orig.tar.xz", "libxml2"),
        ("apk-file", "py3-yaml-6.0.1-r3.apk", "py3-yaml"),
        ("conda-file", "python-dateutil-2.9.0-pyhd8ed1ab_0.conda", "python-dateutil"),
        ("nuget-id", "Newtonsoft.Json", "newtonsoft.json"),
        ("gitlab-project", "acme/web/shop", "acme/web/shop"),
        ("jira-issue", "shop-12", "SHOP"),
        ("composer-file", "monolog~dev.json", "monolog"),
        ("hex-file", "phoenix_html-4.1.1.tar", "phoenix_html"),
        ("pub-file", "http-1.2.2-dev.1.tar.gz", "http"),
        ("uuid", "1F2E3D4C-5B6A-7980-1A2B-3C4D5E6F7A8B", "1f2e3d4c5b6a79801a2b3c4d5e6f7a8b"),
        ("gemini-generate", "gemini-2.5-pro:streamGenerateContent", "gemini-2.5-pro"),
        ("google-mint", "a@acme.iam.example:signJwt", "a@acme.iam.example"),
    ],
)
def test_two_spellings_of_one_thing_are_one(shape: str, text: str, canonical: str) -> None:
    """Expect the canonical spelling, which is what a rule binds and a record keeps."""
    assert SHAPES[shape](text) == canonical


@tried(200)
@given(st.sampled_from(sorted(SHAPES)), st.text(max_size=40))
def test_a_shape_never_raises_and_never_makes_an_empty_name(shape: str, text: str) -> None:
    """Expect a name or None, whatever a client sends."""
    found = SHAPES[shape](text)
    assert found is None or found != ""


@every_row("shape", sorted(set(SHAPES) - {"segment"}))
@every_row("text", ["a\n", "a\0b", "..", ".", "", " ", "\u212a", "a b", "a%2fb"])
def test_no_shape_takes_what_has_a_second_reading(shape: str, text: str) -> None:
    """Expect controls, dots alone, blanks and letters beyond ASCII to fit nothing."""
    assert SHAPES[shape](text) is None

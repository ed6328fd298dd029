"""From files to a document: every mistake has its place, and what contradicts itself does not load."""

from __future__ import annotations

import textwrap

import pytest

from rules.compile import compile_policy
from rules.parse import Parsed, PolicyError, Sources, parse_sources, valid_attribute
from rules.policytests import run_tests
from tests.support.rows import every_row

PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"

CREDENTIALS = """\
version: 1
credentials:
  key:
    kind: header
    header: X-Api-Key
    secret: store:team/key
    hosts: [ok.test]
    owner: team
    placeholder: {env: OK_KEY, shape: "sk_{24}"}
"""

RULE = """\
      - name: read
        host: ok.test
        methods: [GET]
        paths: ["/v1/{id}"]
        credential: key
"""


def parse(policy: str, credentials: str | None = CREDENTIALS, **more: str) -> Parsed:
    files = {"policy.yaml": textwrap.dedent(policy), **{name + ".yaml": text for name, text in more.items()}}
    operator = None if credentials is None else ("credentials.yaml", credentials)
    return parse_sources(Sources(policy=files, credentials=operator, ca_files=lambda path: PEM))


def problems(policy: str, credentials: str | None = CREDENTIALS) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse(policy, credentials)
    return str(caught.value).splitlines()


def dev(rules: str) -> str:
    """A policy whose role `dev` allows `rules`, a block of list items; line 5 is their first line."""
    return "version: 1\nroles:\n  dev:\n    allow:\n" + textwrap.indent(textwrap.dedent(rules), "      ") + "\n"


HAND = "{name: r, host: h.test, methods: [GET], paths: [/a]"

BAD_RULES = [
    ("- {name: r, host: h.test, methods: [GET], paths: [/a], alow: 1}", "5:62: unknown key 'alow'", "B188 typo"),
    ("- {host: h.test, methods: [GET], paths: [/a]}", "5:9: a hand-written operation needs a name:", "no name"),
    ("- {name: r, host: h.test, paths: [/a]}", "5:9: missing key methods", "an allowed host is not a free channel"),
    ("- {name: r, host: h.test, methods: [GET]}", "5:9: missing key paths", "an allowed host is not a free channel"),
    ("- {name: r, host: h.test}", "5:9: missing key methods, paths", "a whole host is never allowed"),
    ("- {name: r, host: h.test, methods: [], paths: [/a]}", "5:42: an empty list of methods", "empty means all?"),
    ("- {name: r, host: h.test, methods: [GET], paths: []}", "5:56: an empty list of paths", "empty means all?"),
    ("- {name: r, host: [], methods: [GET], paths: [/a]}", "5:25: an empty list of hosts", "empty means all?"),
    ("- {service: npm, operations: []}", "5:36: an empty list of operations", "empty means all?"),
    ("- {service: npm}", "5:9: missing key operations", "a service is not a host rule"),
    ("- {service: nmp, operations: [read]}", "5:19: 'nmp' is not known here; did you mean npm?", "typo"),
    ("- {service: npm, operations: [publihs]}", "5:37: no operation 'publihs' here; did you mean publish?", "typo"),
    (
        "- {service: maven, operations: [deploy]}",
        "5:39: no operation 'deploy' here; it exists only at a base of your own (services: like:)",
        "what only a mirror has",
    ),
    ("- {service: osv, operations: [write]}", "5:37: no operation here has the effect write; known: ", "only reads"),
    ("- {service: zzzzzzzz, operations: [read]}", " more", "a long list of names hides what is wrong"),
    ("- {name: r, host: h.test, methods: GET, paths: [/a]}", "expected a list, found text: write [GET]", "a word"),
    ("- {service: npm, operations: [read], paths: [/x]}", "5:44: unknown key 'paths'", "forms do not mix"),
    ("- {service: npm, operations: [read], with: {nme: x}}", "5:51: no operation of this rule has an argument", "typo"),
    ("- {service: npm, operations: [read], with: {}}", "5:50: an empty with:", "an empty binding binds nothing"),
    ("- {name: r, host: '*.com', methods: [GET], paths: [/a]}", "public suffix", "at a public suffix"),
    ("- {name: r, host: '**.co.uk', methods: [GET], paths: [/a]}", "public suffix", "at a public suffix"),
    ("- {name: r, host: '**.github.io', methods: [GET], paths: [/a]}", "public suffix", "a private suffix too"),
    ("- {name: r, host: '*', methods: [GET], paths: [/a]}", "wildcard does not stand here", "above every suffix"),
    ("- {name: r, host: 'a.*.test', methods: [GET], paths: [/a]}", "wildcard does not stand here", "only in front"),
    ("- {name: r, host: 'h.test:443', methods: [GET], paths: [/a]}", "not a host name", "the port has its own key"),
    ("- {name: r, host: 'https://h.test', methods: [GET], paths: [/a]}", "not a host name", "not a URL"),
    ("- {name: r, host: 10.0.0.5, methods: [GET], paths: [/a]}", "entry in destinations", "literals are declared"),
    ("- {name: r, host: 127.1, methods: [GET], paths: [/a]}", "quote this value", "a number"),
    ("- {name: r, host: exeat.internal, methods: [GET], paths: [/a]}", "decided before policy", "our own name"),
    ("- {name: r, host: h.test, methods: [GET, POST], paths: [/a], websocket: true}", "by GET alone", "no other opens"),
    ("- {name: r, host: h.test, methods: [GET], paths: [/a], websocket: true, effect: read}", "not judged", "7.5"),
    (
        "- {name: r, host: h.test, methods: [GET], paths: [/a], websocket: true, result: {keep: [id]}}",
        "no fields to keep",
        "messages are not pruned",
    ),
    ("- {name: r, host: h.test, methods: [GET], paths: [/a], websocket: 'yes'}", "true or false", "not a flag"),
    ("- {name: r, host: h.test, methods: [get], paths: [/a]}", "methods are upper case", "lower case"),
    ("- {name: r, host: h.test, methods: [TRACE], paths: [/a]}", "TRACE is never forwarded", "B113"),
    ("- {name: r, host: h.test, methods: ['*'], paths: [/a]}", "name each method", "no wildcard methods"),
    ("- {name: r, host: h.test, methods: [GET], paths: [a]}", "a path starts with a slash", "relative path"),
    ("- {name: r, host: h.test, methods: [GET], paths: [/a/../b]}", "literal text", "dot segments"),
    ("- {name: r, host: h.test, methods: [GET], paths: ['/**/x']}", "stands last", "a star in the middle"),
    ("- {name: r, host: h.test, methods: [GET], paths: ['/x-${sandbox.a}']}", "one whole path segment", "partial"),
    ("- {name: r, host: h.test, methods: [GET], paths: ['/${env.HOME}']}", "only ${sandbox.name}", "other sources"),
    ("- " + HAND + ", query: {a: []}}", "an empty list permits no value", "empty means all?"),
    ("- " + HAND + ", query: {a: b}}", "expected a list, found text: write [b]", "a value is a list"),
    ("- " + HAND + ", body: {json: {a: string}}}", "a GET has no body", "nothing to judge"),
    ("- " + HAND + ", limits: {requests: 60/min}}", "expected a rate", "a rate has one spelling"),
    ("- " + HAND + ", limits: {response: 1MB}}", "expected a size", "a size has one spelling"),
    ("- " + HAND + ", limits: {bytes: 1MiB}}", "unknown key 'bytes'", "bytes: is for tunnels"),
    ("- " + HAND + ", protocol: grpc}", "'grpc' is not known here", "not built yet"),
    ("- " + HAND + ", when: 'x == 1'}", "unknown key 'when'", "RULINGS 3.7: not built yet is unknown"),
    ("- " + HAND + ", result: {keep: []}}", "an empty list keeps nothing", "empty means all?"),
    ("- " + HAND + ", result: {keep: ['a..b']}}", "a kept field is written like", "not a field path"),
    ("- " + HAND + ", result: {keep: ['**']}}", "a kept field is written like", "everything is not a choice"),
    ("- " + HAND + ", approval: {from: ops, shows: [x]}}", "'x' is not known here", "shows: names arguments"),
    ("- " + HAND + ", credential: key, client_auth: pass}", "impossible on a rule with a credential", "RULINGS 4.2"),
    ("- {tunnel: true, host: '*.h.test', reason: x}", "one exact host", "RULINGS 3.2"),
    ("- {tunnel: true, host: h.test}", "missing key reason", "RULINGS 3.2"),
    ("- {tunnel: true, host: h.test, reason: x, paths: [/a]}", "unknown key 'paths'", "a tunnel sees no paths"),
    ("- {tunnel: true, host: h.test, reason: x, credential: key}", "cannot be put into a tunnel", "T24 b"),
    ("- " + HAND + "}\n- {tunnel: true, host: h.test, reason: x}", "a tunnel allows no other rule", "RULINGS 3.2"),
    ("- {name: w, host: '*.h.test', methods: [GET], paths: [/a]}\n- {tunnel: true, host: a.h.test, reason: x}",
     "a tunnel allows no other rule", "a wildcard covers the tunnel's host"),
    ("- {service: npm, operations: [read]}\n- {service: npm, operations: [read]}", "a second rule is called npm",
     "RULINGS 3.3"),
    ("- " + HAND + "}\n- " + HAND + "}", "a second rule is called r", "names are unique"),
    ("- " + HAND + "}\n- {name: s, host: h.test, methods: [GET], paths: [/b], protocol: h2}", "differ in protocol",
     "one place, one lane"),
    ("- " + HAND + ", credential: nokey}", "credentials.yaml has no credential nokey; known: key", "unknown"),
    ("- " + HAND + ", credential: key}", "credential key is not bound to h.test:443", "T24 a: host not listed"),
    ("- {name: r, host: ok.test, scheme: http, methods: [GET], paths: [/a], credential: key}",
     "dev/r: a credential is never sent over plain HTTP (ok.test:80)", "T24 c"),
    ("- {name: r, host: ok.test, port: 8443, methods: [GET], paths: [/a], credential: key}",
     "credential key is not bound to ok.test:8443", "I10 host and port"),
    ("- {name: r, host: '*.ok.test', methods: [GET], paths: [/a], credential: key}",
     "a credential is never used under a wildcard (*.ok.test)", "B100"),
    ("- {name: r, host: [ok.test, h.test], methods: [GET], paths: [/a], credential: key}",
     "credential key is not bound to h.test:443", "every host of the rule counts"),
]  # fmt: skip


@every_row(("rules", "fragment", "why"), BAD_RULES)
def test_a_rule_with_a_mistake_does_not_load(rules: str, fragment: str, why: str) -> None:
    """The complaint names file, line and column, and nothing is accepted."""
    found = problems(dev(rules))
    assert any(fragment in line for line in found), (why, found)
    assert all(line.startswith(("policy.yaml:", "credentials.yaml:")) for line in found)


def test_unquoted_wildcards_say_quote_this_value() -> None:
    """RULINGS 3.7: the YAML error is translated into what to do."""
    assert "quote this value" in problems(dev("- {name: r, host: **.h.test, methods: [GET], paths: [/a]}"))[0]
    assert "quote this value" in problems(dev("- name: r\n  host: h.test\n  methods: [GET]\n  paths: [/v1/{id}]"))[0]
    assert "quote this value" in problems("version: 1\nroles: {dev: {deny: [{host: {x}}]}}")[0]


BAD_TOPS = [
    ("version: 2\nroles: {}", "1:10: expected the number 1, found", "another version"),
    ("roles: {}", "missing key version", "no version"),
    ("version: 1", "the policy has no roles", "B013 nothing said"),
    ("version: 1\nroles: {}", "the policy has no roles", "B013 nothing said"),
    ("version: 1\nroles: {dev: {}}", "the role says nothing", "write allow: [] to mean it"),
    ("version: 1\nrules: []\nroles: {dev: {allow: []}}", "2:1: unknown key 'rules'; did you mean roles?", "typo"),
    ("version: 1\nroles: {everyone: {allow: []}}", "not a role name", "everyone is a key of its own"),
    ("version: 1\nroles: {Dev: {allow: []}}", "not a role name", "one spelling"),
    ("version: 1\neveryone: {allow: []}\nroles: {dev: {allow: []}}", "unknown key 'allow'", "everyone only denies"),
    ("version: 1\nroles: {dev: {allow: [], include: [ops]}}", "'ops' is not known here", "unknown role"),
    ("version: 1\neveryone: {deny: [{name: d, host: '**.test', methods: [POST], paths: [/a]}]}\n"
     "roles: {dev: {allow: [{tunnel: true, host: h.test, reason: x}]}}",
     "nobody sees what everyone/d denies there", "deny wins, also where nobody would see it"),
    ("version: 1\nroles: {dev: {include: [ops]}, ops: {include: [dev]}}", "includes itself", "a cycle"),
    ("version: 1\nroles: {dev: {deny: [{host: h.test, body: {json: {a: [x]}}}]}}", "does not look into bodies", "deny"),
    ("version: 1\nroles: {dev: {deny: [{service: github, operations: [git.fetch], with: {repository: '${sandbox.x}'}}]}}",  # noqa: E501
     "does not depend on the sandbox", "a missing attribute would lift it"),
    ("version: 1\nservices: {pypi: {like: npm, base: 'https://h.test'}}\nroles: {dev: {allow: []}}",
     "already in the catalogue", "a service is never redefined"),
    ("version: 1\nservices: {x: {like: npmm, base: 'https://h.test'}}\nroles: {dev: {allow: []}}", "did you mean npm",
     "typo"),
    ("version: 1\nservices: {x: {like: npm, base: 'ftp://h.test'}}\nroles: {dev: {allow: []}}", "https or http URL",
     "a base is a URL"),
    ("version: 1\ndestinations:\nroles: {dev: {allow: []}}", "expected a mapping, found nothing", "an empty section"),
    ("version: 1\ndestinations: {h.test: {}}\nroles: {dev: {allow: []}}", "the entry says nothing", "empty"),
    ("version: 1\ndestinations: {'*.h.test': {port: 1}}\nroles: {dev: {allow: []}}", "one exact host", "no wildcards"),
    ("version: 1\ndestinations: {h.test: {addresses: [0.0.0.0/0]}}\nroles: {dev: {allow: []}}", "every address",
     "the table is never switched off"),
    ("version: 1\ndestinations: {h.test: {addresses: [10.0.0.1/8]}}\nroles: {dev: {allow: []}}", "host bits zero",
     "one spelling"),
    ("version: 1\ndestinations: {h.test: {addresses: [10.0.0.0/8], resolve: [11.0.0.1]}}\nroles: {dev: {allow: []}}",
     "does not lie in addresses", "static answers are vetted too"),
    ("version: 1\ndestinations: {h.test: {ca: corp.pem}}\nroles: {dev: {allow: []}}", "expected file:", "a source"),
    ("version: 1\nroles: {dev: {allow: [], dns: lenient}}", "synthetic, strict", "two words"),
    ("version: 1\ndestinations: {h.test: {sni: absent}}\nroles: {dev: {allow: []}}", "required, optional", "two words"),
    ("version: 1\ndestinations: {h.test: {sni: optional, scheme: http}}\nroles: {dev: {allow: []}}",
     "sni means nothing", "clear text has no handshake"),
    ("version: 1\ndestinations: {10.0.0.5: {sni: optional}}\nroles: {dev: {allow: []}}", "for an address",
     "an address has no server name"),
    ("version: 1\ndestinations: {exeat.internal: {port: 1}}\nroles: {dev: {allow: []}}", "decided before", "ours"),
    ("version: 1\nroles: {dev: {allow: []}}\ntests: [{role: dev, deny: 'GET https://h.test/', reason: nope}]",
     "'nope' is not known here", "a reason is one of ours"),
    ("version: 1\nroles: {dev: {allow: []}}\ntests: [{role: ops, deny: 'GET https://h.test/'}]", "'ops' is not known",
     "unknown role"),
    ("version: 1\nroles: {dev: {allow: []}}\ntests: [{role: dev, deny: 'GET https://h.test/', allow: 'GET https://h.test/'}]",
     "exactly one of", "one verdict"),
]  # fmt: skip


@every_row(("text", "fragment", "why"), BAD_TOPS)
def test_a_policy_with_a_mistake_does_not_load(text: str, fragment: str, why: str) -> None:
    """The same for everything outside rules."""
    found = problems(text, None)
    assert any(fragment in line for line in found), (why, found)


def credential(entry: str) -> str:
    return "version: 1\ncredentials:\n  key: " + entry


GOOD = 'secret: "store:a/b", owner: team, placeholder: {env: OK_KEY, shape: "sk_{24}"}'
BAD_CREDENTIALS = [
    ("{kind: bearer, hosts: ['*.ok.test'], " + GOOD + "}", "never to a wildcard", "B100"),
    ("{kind: bearer, hosts: [], " + GOOD + "}", "an empty list of hosts", "empty means all?"),
    ("{kind: bearer, " + GOOD + "}", "missing key hosts", "a secret goes only to named hosts"),
    ("{kind: bearer, hosts: ['https://ok.test'], " + GOOD + "}", "without scheme and path", "a URL"),
    ("{kind: ntlm, hosts: [ok.test], " + GOOD + "}", "'ntlm' is not known here", "not built yet"),
    ("{kind: header, hosts: [ok.test], " + GOOD + "}", "needs header:", "where to?"),
    ("{kind: header, header: Host, hosts: [ok.test], " + GOOD + "}", "cannot hold", "not a slot"),
    ("{kind: header, header: Transfer-Encoding, hosts: [ok.test], " + GOOD + "}", "cannot hold", "not a slot"),
    ("{kind: bearer, header: X, hosts: [ok.test], " + GOOD + "}", "does not go with kind: bearer", "contradiction"),
    ("{kind: bearer, hosts: [ok.test], secret: sk_live_abcdef, owner: t, placeholder: {env: K, shape: '{24}'}}",
     "never written here", "a pasted secret"),
    ("{kind: bearer, hosts: [ok.test], secret: 'exec:cat x', owner: t, placeholder: {env: K, shape: '{24}'}}",
     "named by its source", "not built yet"),
    ("{kind: bearer, hosts: [ok.test], secret: 'store:../x', owner: t, placeholder: {env: K, shape: '{24}'}}",
     "not a reference", "traversal"),
    ("{kind: bearer, hosts: [ok.test], secret: 'store:${env.X}', owner: t, placeholder: {env: K, shape: '{24}'}}",
     "only ${sandbox.name}", "other sources"),
    ("{kind: bearer, hosts: [ok.test], secret: 'env:K', owner: t, placeholder: {env: LD_PRELOAD, shape: '{24}'}}",
     "steers programs", "a dangerous variable"),
    ("{kind: bearer, hosts: [ok.test], secret: 'env:K', owner: t, placeholder: {env: K, shape: 'x{8}'}}",
     "at least {24}", "too short to be recognised"),
    ("{service: pypy, secret: 'env:K', owner: t}", "did you mean pypi", "typo"),
    ("{service: github, kind: bearer, secret: 'env:K', owner: t}", "already says the kind", "contradiction"),
    ("{kind: bearer, hosts: [ok.test, pub.test], " + GOOD + "}",
     "credential key is bound to pub.test:443, but no rule that uses it covers that host", "I17: unenforced"),
]  # fmt: skip


@every_row(("entry", "fragment", "why"), BAD_CREDENTIALS)
def test_a_credential_with_a_mistake_does_not_load(entry: str, fragment: str, why: str) -> None:
    """Complaints name the operator's file; a pasted secret is not repeated."""
    found = problems("version: 1\nroles:\n  dev:\n    allow:\n" + RULE, credential(entry))
    assert any(fragment in line and "credentials.yaml:3" in line for line in found), (why, found)
    assert not any("sk_live_abcdef" in line for line in found)


def test_two_credentials_for_one_request_do_not_load() -> None:
    """RULINGS 3.1: an error at load where it can be proven."""
    two = CREDENTIALS + CREDENTIALS.split("credentials:\n")[1].replace("  key:", "  other:").replace("OK_KEY", "OTHER")
    rules = RULE + RULE.replace("name: read", "name: again").replace("credential: key", "credential: other")
    found = problems("version: 1\nroles:\n  dev:\n    allow:\n" + rules, two)
    assert "dev/read and dev/again both permit dev/read with a different credential" in found[0]


def test_two_placeholders_in_one_variable_do_not_load() -> None:
    """A sandbox has one value for each variable."""
    two = CREDENTIALS + CREDENTIALS.split("credentials:\n")[1].replace("  key:", "  other:").replace(
        "ok.test", "b.test"
    )
    rules = RULE + RULE.replace("read", "again").replace("ok.test", "b.test").replace(
        "credential: key", "credential: other"
    )
    found = problems("version: 1\nroles:\n  dev:\n    allow:\n" + rules, two)
    assert "both put their placeholder in OK_KEY" in found[0]


def test_everything_wrong_is_reported_at_once() -> None:
    """Two rules, two complaints, in the order of the file."""
    found = problems(dev("- {name: r, host: '*.com', methods: [GET], paths: [/a]}\n- {service: npm}"), None)
    assert [line.split(":")[1] for line in found] == ["5", "6"]


def test_no_policy_at_all_is_an_error() -> None:
    """B013: a missing policy never means that everything is permitted."""
    with pytest.raises(PolicyError, match="exeat init"):
        parse_sources(Sources(policy={}))


def test_warnings_do_not_refuse() -> None:
    """A one-label wildcard in a deny, `client_auth: pass`, an unused credential, a host that policy moves."""
    policy = """\
        version: 1
        destinations: {ok.test: {addresses: [10.0.0.0/8]}}
        roles:
          dev:
            allow:
              - {name: r, host: h.test, methods: [GET], paths: [/a], client_auth: pass}
            deny:
              - {host: "*.evil.test"}
        """
    messages = [str(warning) for warning in parse(policy).warnings]
    later = parse(dev("- {service: anthropic, operations: [batches.create]}"), None).warnings
    assert "anthropic/batches.create is known but cannot be judged yet" in str(later[0])
    assert any('"**.evil.test"' in message and "policy.yaml:8:" in message for message in messages)
    assert any("foreign" in message or "accounts" in message for message in messages)
    assert any("no rule uses credential key" in message and "credentials.yaml:" in message for message in messages)
    assert any("policy decides where ok.test is" in message for message in messages)


DEAD = [
    ("host: a.h.test", '"**.h.test"', True, "an exact host under any depth"),
    ("host: a.h.test", '"*.h.test"', True, "or one label"),
    ('host: "*.h.test"', '"**.h.test"', True, "a wildcard under a wider one"),
    ('host: "**.a.h.test"', '"**.h.test"', True, "of any depth"),
    ("host: [a.h.test, b.h.test]", '["*.h.test", z.test]', True, "all of several hosts"),
    ("host: [a.h.test, ok.test]", '"**.h.test"', False, "one of them is left"),
    ('host: "**.h.test"', '"*.h.test"', False, "deeper names are left"),
    ("host: h.test", '"**.h.test"', False, "the apex is left"),
    ("host: a.h.test", "a.h.test, paths: [/admin]", False, "other paths are left"),
    ("host: a.h.test", "a.h.test, port: 8443", False, "another port is left"),
]


@pytest.mark.parametrize(("allow", "deny", "dead", "why"), DEAD, ids=[row[3] for row in DEAD])
def test_an_allow_rule_that_can_never_apply_is_warned_of(allow: str, deny: str, dead: bool, why: str) -> None:
    """Deny wins whatever is nearer, so the warning names both rules (field case C039)."""
    policy = f"""\
        version: 1
        roles:
          dev:
            allow:
              - {{name: r, {allow}, methods: [GET], paths: [/a]}}
            deny:
              - {{name: never, host: {deny}}}
        """
    found = [str(warning) for warning in parse(policy, None).warnings]
    assert any("dev/r can never apply: dev/never denies" in text for text in found) is dead, (why, found)


def test_an_operators_destination_is_not_changed_by_policy() -> None:
    """What credentials.yaml says of a host stands; the same words in policy are fine."""
    settled = CREDENTIALS + "destinations: {ok.test: {addresses: [10.0.0.0/8], port: 8443}}\n"
    policy = "version: 1\nroles:\n  dev:\n    allow:\n" + RULE
    parsed = parse(policy, settled)
    assert not parsed.warnings
    assert parsed.document["credentials"]["key"]["authorities"] == [["ok.test", 8443]]
    moved = policy + "destinations: {ok.test: {addresses: [203.0.113.0/24]}}\n"
    assert "is settled by destinations: in credentials.yaml" in problems(moved, settled)[0]


def test_a_documents_secrets_are_references_kept_apart() -> None:
    """The document, which workers get, holds neither secret nor reference."""
    parsed = parse("version: 1\nroles:\n  dev:\n    allow:\n" + RULE)
    assert parsed.secrets["key"].references == {"value": "store:team/key"}
    assert "team/key" not in str(parsed.document)


def test_the_digest_names_the_meaning_not_the_spelling() -> None:
    """Comments, order of keys, roles and rules do not change the digest; any rule does."""
    first = compile_policy(
        parse(dev("- {service: npm, operations: [read]}\n- {service: pypi, operations: [read]}"), None).document
    )
    turned = compile_policy(
        parse(
            "# x\n" + dev("- {service: pypi, operations: [read]}\n- {operations: [read], service: npm}"), None
        ).document
    )
    other = compile_policy(parse(dev("- {service: npm, operations: [read]}"), None).document)
    assert first.digest == turned.digest
    assert first.digest != other.digest


def test_roles_from_several_files_everyone_and_include() -> None:
    """Files are merged, `everyone` binds every role, `include` takes rules over under the role's own name."""
    base = "version: 1\nroles:\n  base:\n    allow:\n      - {service: npm, operations: [read]}\n"
    team = "version: 1\neveryone: {deny: [{host: '**.evil.test'}]}\nroles:\n  dev: {include: [base]}\n"
    policy = compile_policy(parse(base, None, team=team).document)
    assert [rule.id for rule in policy.roles["dev"].rules] == ["dev/npm", "everyone/**.evil.test"]
    assert [rule.id for rule in policy.roles["base"].rules] == ["base/npm", "everyone/**.evil.test"]
    twice = "version: 1\nroles: {base: {allow: []}}\n"
    with pytest.raises(PolicyError, match="role base is already written"):
        parse(base, None, team=twice)


def test_sandbox_attributes_in_paths_become_bindings() -> None:
    """`/t/${sandbox.tenant}/x` is one captured segment that must equal the sandbox's own attribute."""
    parsed = parse(
        dev("- {name: r, host: h.test, methods: [GET], paths: ['/t/${sandbox.team}/{id}']}")
        + "tests:\n"
        + "  - {role: dev, allow: 'GET https://h.test/t/blue/1', sandbox: {team: blue}}\n"
        + "  - {role: dev, deny: 'GET https://h.test/t/red/1', sandbox: {team: blue}}\n"
        + "  - {role: dev, deny: 'GET https://h.test/t/red/1'}\n",
        None,
    )
    assert [result.passed for result in run_tests(compile_policy(parsed.document), parsed.tests)] == [True, True, True]


@every_row("value", ["", ".", "..", "a/../b", "/a", "a/", "a//b", "a*", "a b", "a\n", "${x}", "a" * 129])
def test_attributes_that_could_mean_more_are_invalid(value: str) -> None:
    """RULINGS 3.3: what is substituted is plain words."""
    assert not valid_attribute(value)


def test_plain_attributes_are_valid() -> None:
    """A name, and a repository with its owner."""
    assert valid_attribute("acme")
    assert valid_attribute("acme/shop.js")


def test_a_websocket_rule_writes_unless_it_says_more() -> None:
    """What goes through a WebSocket is not judged, so a rule that permits one is never read (RULINGS 7.5)."""
    text = dev(
        """
        - {name: plain, host: h.test, methods: [GET], paths: [/a]}
        - {name: socket, host: h.test, methods: [GET], paths: [/b], websocket: true}
        - {name: shell, host: h.test, methods: [GET], paths: [/c], websocket: true, effect: execute}
        - {name: none, host: h.test, methods: [GET], paths: [/d], websocket: false}
        """
    )
    rules = compile_policy(parse(text).document).roles["dev"].rules
    found = {rule.id.partition("/")[2]: (op.effect, op.websocket) for rule in rules for op in rule.operations}
    assert found == {
        "plain": ("read", False),
        "socket": ("write", True),
        "shell": ("execute", True),
        "none": ("read", False),
    }

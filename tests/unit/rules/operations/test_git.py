"""git: what a push states before its pack, and whose repository a path names."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.arguments import settled
from rules.facts import RequestFacts
from rules.operations import check_head_params, check_params
from rules.operations.git import MAX_COMMANDS, flush, is_ref, push, repository
from tests.support.properties import tried
from tests.support.pushes import CAPS, NEW, OLD, ZERO
from tests.support.pushes import GOOD as CREATE
from tests.support.pushes import TYPE as MEDIA
from tests.support.pushes import packet as pkt
from tests.support.pushes import push as body
from tests.support.rows import every_row

TYPE = ("content-type", MEDIA)


def facts(target: str = "/o/r.git/git-receive-pack", *headers: tuple[str, str], method: str = "POST") -> RequestFacts:
    return RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=None,
        target=f"https://git.test{target}",
        headers=(("host", "git.test"), *(headers or (TYPE,))),
        has_body=True,
    )


def judged(raw: bytes, *, partial: bool = False, options: bool = False) -> object:
    found = push({"options": True} if options else {}, raw, replace(facts(), partial=partial))
    return None if found is None else settled(found)


# --- pushes that are none ---

BAD: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("a flush alone", b"0000"),
    ("no flush", body(CREATE)[:-12]),
    ("a cut packet", body(CREATE)[:60]),
    ("no pack", body(CREATE, pack=b"")),
    ("another pack", body(CREATE, pack=b"PUCK")),
    ("a second list", body(CREATE, pack=b"0000PACK")),
    ("a pack behind a deletion", body((OLD, ZERO, "refs/heads/x"))),
    ("bytes behind a deletion", body((OLD, ZERO, "refs/heads/x"), pack=b"x")),
    ("an upper-case length", pkt("x" * 160).replace(b"00a4", b"00A4") + body(CREATE)),
    ("an empty packet", b"0004" + body(CREATE)),
    ("a delimiter", b"0001" + body(CREATE)),
    ("an end of answer", b"0002" + body(CREATE)),
    ("a length of three", b"0003" + body(CREATE)),
    ("a length beyond the protocol", b"ffff" + b"x" * 65531),
    ("a length that is no number", b"-001" + body(CREATE)),
    ("a length with an underscore", b"0_10" + body(CREATE)),
    ("a NUL in a later command", body(CREATE, (OLD, NEW, "refs/heads/main\x00report-status"))),
    ("two NULs in the first", body(CREATE, caps=" report-status\x00atomic")),
    ("an unknown capability", body(CREATE, caps=" report-status push-cert=nonce")),
    ("an unknown hash", body(CREATE, caps=" object-format=md5")),
    ("two hashes", body(CREATE, caps=" object-format=sha1 object-format=sha256")),
    ("ids of another hash", body(CREATE, caps=" object-format=sha256")),
    ("a push certificate", pkt("push-cert\x00 report-status") + body(CREATE)),
    ("a shallow line behind a command", pkt(" ".join(CREATE) + "\x00" + CAPS) + pkt(f"shallow {OLD}") + b"0000PACK"),
    ("a shallow line of nothing", pkt("shallow x") + body(CREATE)),
    ("an id in capitals", body((ZERO, "B" * 40, "refs/heads/x"))),
    ("a short id", body((ZERO, "b" * 39, "refs/heads/x"))),
    ("two zero ids", body((ZERO, ZERO, "refs/heads/x"))),
    ("two spaces", body((ZERO, NEW, " refs/heads/x"))),
    ("two commands for one ref", body(CREATE, CREATE)),
    ("push options", body(CREATE, caps=" push-options", pack=b"") + pkt("ci.skip") + b"0000PACK"),
    ("push options without an end", body(CREATE, caps=" push-options", pack=b"PACK")),
    ("bytes that are not UTF-8", body(CREATE).replace(b"agent/x", b"agent/\xff")),
    ("too many commands", body(*((ZERO, NEW, f"refs/heads/{n}") for n in range(MAX_COMMANDS + 1)))),
]


@every_row(("why", "raw"), BAD, ids=[why for why, _ in BAD])
def test_what_is_no_push_states_nothing(why: str, raw: bytes) -> None:
    """Expect no match for anything that a server might read otherwise."""
    assert judged(raw) is None


@every_row(
    "ref",
    [
        *(
            "HEAD",
            "main",
            "refs/heads",
            "refs//heads/x",
            "/refs/heads/x",
            "refs/heads/x/",
            "refs/heads/",
            "ref/heads/x",
        ),
        *("refs/heads/../x", "refs/heads/a..b", "refs/heads/.x", "refs/heads/x.", "refs/heads/x.lock", "refs/x.lock/y"),
        *("refs/heads/x y", "refs/heads/x\n", "refs/heads/x\t", "refs/heads/x~1", "refs/heads/x^", "refs/heads/x:y"),
        *("refs/heads/x?", "refs/heads/*", "refs/heads/[x", "refs/heads/x\\y", "refs/heads/x@{1}", "refs/heads/@"),
        *("refs/heads/\u202ex", "refs/heads/\x7f", "refs/heads/" + "x" * 250),
    ],
)
def test_a_ref_that_git_would_not_take_is_refused(ref: str) -> None:
    """Expect the rules of git-check-ref-format, full names only, and printable text."""
    assert not is_ref(ref)
    assert judged(body((ZERO, NEW, ref))) is None


@pytest.mark.parametrize(
    "headers",
    [
        (("accept", "*/*"),),
        (("content-type", "application/x-git-upload-pack-request"),),
        (TYPE, TYPE),
        (("content-type", "application/x-git-receive-pack-request; charset=utf-8"),),
    ],
)
def test_a_push_is_sent_as_a_push(headers: tuple[tuple[str, str], ...]) -> None:
    """Expect exactly its media type, once."""
    assert push({}, body(CREATE), facts("/o/r.git/git-receive-pack", *headers)) is None
    assert flush({}, b"0000", facts("/o/r.git/git-receive-pack", *headers)) is None


@tried(300)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_make_the_matcher_stumble(raw: bytes, partial: bool) -> None:
    """Expect an answer and no exception for anything, also behind a good beginning."""
    for start in (b"", body(CREATE, pack=b""), body(CREATE)[:50]):
        judged(start + raw, partial=partial)


# --- pushes ---


def test_every_ref_and_change_of_a_push_is_stated() -> None:
    """Expect all commands, whatever their order, and what they do."""
    raw = body((OLD, NEW, "refs/heads/main"), CREATE, (NEW, ZERO, "refs/tags/v1"))
    assert judged(raw) == {
        "ref": ("refs/heads/agent/x", "refs/heads/main", "refs/tags/v1"),
        "change": ("create", "delete", "update"),
    }


def test_a_deletion_needs_no_pack() -> None:
    """Expect a push that only deletes to end with its commands."""
    assert judged(body((OLD, ZERO, "refs/heads/x"), pack=b"")) == {"ref": "refs/heads/x", "change": "delete"}


def test_sha256_repositories_shallow_clones_and_line_ends() -> None:
    """Expect the other hash, lines of a shallow clone and a line feed at the end of a command."""
    wide = body(("0" * 64, "b" * 64, "refs/heads/x"), caps=" object-format=sha256")
    assert judged(wide) == {"ref": "refs/heads/x", "change": "create"}
    assert judged(pkt(f"shallow {OLD}\n") + body(CREATE)) == {"ref": CREATE[2], "change": "create"}
    fed = pkt(" ".join(CREATE) + "\x00report-status\n") + pkt(f"{OLD} {NEW} refs/heads/y\n") + b"0000PACK"
    assert judged(fed) == {"ref": (CREATE[2], "refs/heads/y"), "change": ("create", "update")}


def test_push_options_are_stated_where_a_service_takes_them() -> None:
    """Expect them as an argument, and a client that sends none to need no such leave."""
    raw = body(CREATE, caps=" push-options", pack=b"") + pkt("ci.skip") + pkt("topic=x\n") + b"0000PACK"
    assert judged(raw, options=True) == {
        "ref": CREATE[2],
        "change": "create",
        "option": ("ci.skip", "topic=x"),
    }
    assert judged(body(CREATE, caps=" push-options", pack=b"") + b"0000PACK") is not None


def test_the_question_whether_one_may_push_states_nothing() -> None:
    """Expect one flush, whole, and nothing beside it."""
    assert flush({}, b"0000", facts()) == {}
    assert flush({}, b"0000", replace(facts(), partial=True)) is None
    assert flush({}, b"00000000", facts()) is None
    assert flush({}, body(CREATE), facts()) is None


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_beginning_that_ends_in_the_pack_is_enough(cut: int) -> None:
    """Expect the commands to count as soon as they are whole; the pack is not looked at."""
    raw = body(CREATE, pack=b"")
    assert judged(raw + b"PACK"[:cut] + (b"" if cut < 4 else b"\x00" * 100), partial=True) is not None
    assert judged(raw + b"PUCK"[:cut], partial=True) == ({"ref": CREATE[2], "change": "create"} if cut < 2 else None)


def test_a_beginning_that_ends_in_the_commands_is_not_enough() -> None:
    """Expect a push whose commands do not end within the bound to state nothing."""
    raw = body(CREATE, (OLD, NEW, "refs/heads/main"), pack=b"")
    for size in range(len(raw)):
        assert judged(raw[:size], partial=True) is None, size
    assert judged(raw, partial=True) is not None


# --- repositories ---


@every_row(
    "path",
    [
        *("/info/refs", "/o/r.git/info", "/o/r.git/info/refs/", "/o/r.git/info/Refs", "/o/.git/info/refs"),
        *("/o/r.git.git/info/refs", "/o.git/r/info/refs", "/o/-r%20/info/refs", "/-o/r/info/refs", "/o%2Fr/info/refs"),
        *("/o/info/refs/info/refs", "/o/git-upload-pack/info/refs", "/a/b/c/d/e/f/g/h/i/info/refs", "/~o/r/info/refs"),
    ],
)
def test_a_path_that_names_no_one_repository_is_refused(path: str) -> None:
    """Expect groups and a name in plain letters, and one place where the path can be cut."""
    assert repository({"suffix": "info/refs"}, facts(path, method="GET")) is None


def test_a_repository_is_named_with_its_groups_and_without_git() -> None:
    """Expect one spelling for each repository, also behind words of the path."""
    assert repository({"suffix": "info/refs"}, facts("/team/group/r.git/info/refs")) == {"repository": "team/group/r"}
    assert repository({"suffix": "info/refs"}, facts("/r/info/refs")) == {"repository": "r"}
    unlock = {"suffix": "info/lfs/locks/*/unlock"}
    assert repository(unlock, facts("/o/r/info/lfs/locks/7/unlock")) == {"repository": "o/r"}
    assert repository(unlock, facts("/o/r/info/lfs/locks/7.8/unlock")) is None


def test_parameters_are_checked_when_a_service_is_read() -> None:
    """Expect a sentence for each that is missing or unknown."""
    bad: list[tuple[str, dict[str, object]]] = [("suffix", {}), ("suffix", {"suffix": "/x"})]
    bad += [("options", {"options": "yes"}), ("options", {"more": True}), ("suffix", {"suffix": "x", "more": 1})]
    for name, params in bad:
        check = check_head_params if name == "suffix" else check_params
        with pytest.raises(ValueError, match=name):
            check("git_repository" if name == "suffix" else "git_push", params)
    check_head_params("git_repository", {"suffix": "info/refs"})
    check_params("git_push", {"options": True})

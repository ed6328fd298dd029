"""How a repository of GitHub may be spelled, and what only looks like it."""

from __future__ import annotations

from rules.catalogue import builtin_services
from rules.decide import decide_request
from rules.decision import Permit
from rules.names import RuleId
from rules.policy import Policy, Role, Rule
from tests.support.policies import NOW, request, sandbox
from tests.support.rows import every_row

FETCH = builtin_services()["github"].select("git.fetch")
RULE = Rule(id=RuleId("dev/fetch"), action="allow", operations=FETCH, bind={"repository": ("Acme/Shop",)})
POLICY = Policy(digest="", document={}, roles={"dev": Role(name="dev", rules=(RULE,))}, destinations={}, credentials={})


@every_row(
    ("path", "permitted"),
    [
        ("/acme/shop-evil", False),
        ("/acme/shop.evil", False),
        ("/acme/shop.git.git", False),
        ("/acme/shop.GIT.git", False),
        ("/acme/shop/shop", False),
        ("/acme/shop//", False),
        ("/acme/shop/", False),
        ("/acme%2Fshop", False),
        ("/acme/sho\u212a".encode().decode("latin-1"), False),
        ("/evil/shop", False),
        ("/acme/shop", True),
        ("/acme/shop.git", True),
        ("/Acme/Shop.git", True),
        ("/ACME/SHOP", True),
    ],
)
def test_letters_may_differ_and_the_ending_may_be_left_out_and_nothing_else(path: str, permitted: bool) -> None:
    """C117: the forge ignores case and `.git`; a longer name, two endings and another owner are other repositories.

    Of a slash at the end of an address git makes none twice; a client that does is refused.
    """
    try:
        facts = request(f"GET https://github.com{path}/info/refs?service=git-upload-pack")
    except ValueError:
        assert not permitted
        return
    assert isinstance(decide_request(POLICY, sandbox(), facts, NOW), Permit) is permitted

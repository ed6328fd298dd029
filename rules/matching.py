"""Matching: is this attempt that operation, and with which arguments?

1. The head comes first, cheapest facts first: host, port, scheme, method, path, query, required headers, then the
   head matcher of a protocol where the operation has one.
2. Then the body, where the operation lies in it: not read yet -> WantsBody; bytes -> the evaluator; attested
   by an executor -> only its word counts (the vault parses nothing that came from outside).
   With `prefix` it is asked for the first bytes only.
3. Arguments are made from captures and from what head matcher and evaluator found; a rule binds them (`with:`).

Anything unexpected is NoMatch: an evaluator that raises, a body over its bound, an unknown matcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, urlencode

from rules.arguments import Pairs, Value, grouped, settled, values_of
from rules.facts import BodyAttested, RequestFacts, Sandbox
from rules.names import Host, InvalidName
from rules.operations import EVALUATORS, HEAD_MATCHERS, LATER
from rules.operations.media import is_coded, media_type
from rules.paths import CanonicalPath
from rules.policy import HeadSpec, HostPattern, Operation, PathPattern, Rule
from rules.shapes import SHAPES, lower_ascii

Near = str
"""How far an operation that did not match came: one of NEARNESS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMatch:
    """Not this operation. `near` names the first check that failed; later names mean a nearer miss (NEARNESS)."""

    near: Near


@dataclass(frozen=True, slots=True, kw_only=True)
class WantsBody:
    """The head fits; at most `bound` bytes of body decide: the whole of it, or with `prefix` its first bytes."""

    bound: int
    prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """It is this operation. `arguments` holds only those that this attempt states."""

    arguments: dict[str, Value] = field(default_factory=dict)


NEARNESS: tuple[Near, ...] = (
    "host",
    "port",
    "scheme",
    "path",
    "method",
    "query",
    "header",
    "operation",
    "body",
    "argument",
    "later",
)
"""Checks in order: the later the one that failed, the more useful it is to tell the agent. `operation`: the head
matcher. `later`: recognised by its head, but its matcher is not built yet."""


class InvalidTemplate(ValueError):
    """A path template or binding pattern that cannot be used. str() is a fixed sentence."""


def match_operation(op: Operation, facts: RequestFacts) -> Matched | WantsBody | NoMatch:
    """Judge whether `facts` state the operation `op`. Never raises."""
    destination = facts.destination
    labels = next((found for one in op.hosts if (found := one.captures(destination.host)) is not None), None)
    if labels is None:
        return NoMatch(near="host")
    if destination.port != op.port:
        return NoMatch(near="port")
    if destination.scheme != op.scheme:
        return NoMatch(near="scheme")
    captures: dict[str, str] | None = None
    for pattern in op.paths:
        captures = match_path(pattern, facts.path)
        if captures is not None:
            break
    if captures is None:
        return NoMatch(near="path")
    if facts.method not in op.methods and not (facts.method == "HEAD" and "GET" in op.methods):
        return NoMatch(near="method")
    if not _query_fits(op, facts):
        return NoMatch(near="query")
    if not _headers_fit(op, facts):
        return NoMatch(near="header")
    if op.body is not None and op.body.matcher == LATER:
        return NoMatch(near="later")
    if op.body is None and facts.has_body and facts.method in ("GET", "HEAD"):
        # Few origins read it, every one receives it: a way out that no read needs (RULINGS 4.7).
        return NoMatch(near="body")
    if op.body is None and facts.has_body and any("{query." in template for template in op.arguments.values()):
        # Frameworks merge query and form: what the query states, a body that nobody judges could state otherwise.
        return NoMatch(near="body")
    captures.update((f"query.{name}", value) for name, value in facts.query.pairs)
    captures.update((f"host.{name}", label) for name, label in labels.items())
    arguments: dict[str, Value] = {**_arguments(op, captures)}
    if op.head is not None:
        recognised = _recognise(op.head, facts)
        if recognised is None or recognised.keys() & arguments.keys():
            return NoMatch(near="operation")
        arguments |= recognised
    stated: Mapping[str, Value] = {}
    if op.body is not None:
        if op.body.prefix and is_coded(facts):
            return NoMatch(near="header")  # the beginning of a coded body is not the beginning that the origin reads
        if facts.partial and not op.body.prefix:
            return NoMatch(near="body")
        match facts.body:
            case None:
                return WantsBody(bound=op.body.bound, prefix=op.body.prefix)
            case BodyAttested():
                attested = _attested(op.id, facts.body)
                if attested is None:
                    return NoMatch(near="body")
                stated = attested
            case bytes():
                evaluated = _evaluate(op, facts.body, facts)
                if evaluated is None:
                    return NoMatch(near="body")
                stated = evaluated
    if arguments.keys() & stated.keys():
        return NoMatch(near="argument")
    whole = settled({**arguments, **stated})
    return NoMatch(near="argument") if whole is None else Matched(arguments=whole)


def match_path(pattern: PathPattern, path: CanonicalPath) -> dict[str, str] | None:
    """Return the captures of `path` (decoded once, in the shape's canonical spelling), or None.

    A capture takes exactly one non-empty segment; `**` takes one or more, the first non-empty. A segment that
    holds an encoded slash fits only where the pattern says `encoded_slash`.
    """
    if path.encoded_slash and not pattern.encoded_slash:
        return None
    if len(pattern.shapes) != len(pattern.names):
        return None
    segments = path.segments
    fixed = len(pattern.segments)
    if pattern.rest:
        if len(segments) <= fixed or segments[fixed] == "":
            return None
    elif len(segments) != fixed:
        return None
    captures: dict[str, str] = {}
    index = 0
    for wanted, segment in zip(pattern.segments, segments, strict=False):
        if wanted is not None:
            if wanted != segment:
                return None
            continue
        value = SHAPES[pattern.shapes[index]](segment)
        if value is None:
            return None
        captures[pattern.names[index]] = value
        index += 1
    return captures


def parse_path(template: str, *, encoded_slash: bool = False) -> PathPattern:
    """Return the pattern for `template`: `/v1/orders/{id}`, `/public/**`, `/{package:npm-package}`.

    `{name}` takes one segment, `{name:shape}` one segment of a shape in SHAPES. Literals are written as the
    decoded text. Raises InvalidTemplate.
    """
    if not template.startswith("/") or len(template) > 2048:
        raise InvalidTemplate("a path starts with a slash and has at most 2,048 characters")
    parts = template[1:].split("/")
    rest = parts[-1] == "**"
    if rest:
        parts.pop()
    segments: list[str | None] = []
    names: list[str] = []
    shapes: list[str] = []
    for position, part in enumerate(parts):
        capture = _CAPTURE.match(part)
        if capture:
            name, shape = capture[1], capture[2] or "segment"
            if name in names:
                raise InvalidTemplate("a capture name occurs twice in one path")
            if shape not in SHAPES:
                raise InvalidTemplate("unknown capture shape")
            names.append(name)
            shapes.append(shape)
            segments.append(None)
        elif part == "" and (rest or position != len(parts) - 1):
            raise InvalidTemplate("a path has no empty segment")
        elif part in (".", "..") or _NOT_LITERAL.search(part):
            raise InvalidTemplate("a path segment is literal text or one {name}; ** stands last")
        else:
            segments.append(part)
    return PathPattern(
        template=template,
        segments=tuple(segments),
        names=tuple(names),
        shapes=tuple(shapes),
        rest=rest,
        encoded_slash=encoded_slash,
    )


def parse_host_template(text: str) -> HostPattern:
    """Return the pattern for `{bucket}.s3.{region}.amazonaws.com`: each `{name}` one whole label, the last two literal.

    Raises InvalidTemplate.
    """
    names: list[str] = []
    plain: list[str] = []
    labels = text.split(".")
    for label in labels:
        capture = _HOST_CAPTURE.match(label)
        plain.append("x" if capture else label)
        names += [capture[1]] if capture else []
    try:
        canonical = Host.parse(".".join(plain))
    except InvalidName:
        raise InvalidTemplate("a host template is a host name in which {name} stands for whole labels") from None
    if canonical.is_literal or canonical.text != ".".join(plain):
        raise InvalidTemplate("a host template is written in lower case, as a host name")
    if not names or len(set(names)) != len(names) or len(labels) < 3 or any("{" in label for label in labels[-2:]):
        raise InvalidTemplate("a host template names each capture once, and its last two labels are literal")
    return HostPattern(kind="template", suffix=text)


def bind_arguments(
    rule: Rule, sandbox: Sandbox, arguments: Mapping[str, Value], *, unbound: tuple[str, ...] = (), every: bool = True
) -> bool:
    """True if every argument that `rule` binds is stated, and all its values fit one of the patterns each.

    `unbound` are the arguments that this request leaves to the ones that follow (Operation.unbound). Not `every`:
    one value that fits is enough, as a deny rule reads them.
    A pattern is text, `*` (any run of characters inside one `/`-separated segment, at least one if alone) and
    `${sandbox.x}`. An argument that the attempt does not state, or an attribute that the sandbox does not have,
    never fits. Arguments that some operation of the rule marks as `fold` ignore ASCII case.
    """
    return misfit(rule, sandbox, arguments, unbound=unbound, every=every) is None


def misfit(
    rule: Rule, sandbox: Sandbox, arguments: Mapping[str, Value], *, unbound: tuple[str, ...] = (), every: bool = True
) -> str | None:
    """The first argument, by name, for which bind_arguments is False; None where all fit."""
    folded = {name for op in rule.operations for name in op.fold}
    for name, patterns in sorted(rule.bind.items()):
        value = arguments.get(name)
        if value is None:
            if name in unbound:
                continue
            return name
        fits = (
            any(_fits(pattern, item, sandbox, fold=name in folded) for pattern in patterns) for item in values_of(value)
        )
        if not (all(fits) if every else any(fits)):
            return name
    return None


def pattern_fits(pattern: str, value: str, sandbox: Sandbox) -> bool:
    """True if `value` fits one pattern of `with:`, letters compared exactly."""
    return _fits(pattern, value, sandbox, fold=False)


def check_binding(pattern: str) -> None:
    """Raise InvalidTemplate unless `pattern` can be used in `with:`."""
    if not pattern or len(pattern) > 512 or not pattern.isprintable() or "**" in pattern:
        raise InvalidTemplate("a binding is printable text; * stays inside one segment")
    if _SANDBOX.sub("", pattern).find("${") >= 0:
        raise InvalidTemplate("a binding substitutes only ${sandbox.name}")


def attestation(operation: str, arguments: Pairs) -> str:
    """Return the entry of `BodyAttested.operations` by which an executor states an operation and its arguments.

    The plain operation id is an attestation without arguments.
    """
    return f"{operation}?{urlencode(sorted(arguments))}" if arguments else operation


# --- helpers ---------------------------------------------------------------------------------------------------------

_CAPTURE = re.compile(r"\{([a-z][a-z0-9_]{0,31})(?::([a-z][a-z0-9-]{0,31}))?\}\Z")
_HOST_CAPTURE = re.compile(r"\{([a-z][a-z0-9_]{0,31})\}\Z")
_NOT_LITERAL = re.compile(r"[{}*?#\\%;\x00-\x20\x7f]")
_PLACE = re.compile(r"\{([a-z][a-z0-9_.]{0,63})\}")
_SANDBOX = re.compile(r"\$\{sandbox\.([a-z][a-z0-9_]{0,63})\}")
_ONE_SEGMENT = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


def _query_fits(op: Operation, facts: RequestFacts) -> bool:
    pairs = facts.query.pairs
    names = [name for name, _ in pairs]
    if any(names.count(required) != 1 for required in op.query_required):
        return False
    if op.query is None:
        return True
    if len(set(names)) != len(names):
        return False
    for name, value in pairs:
        if name not in op.query:
            return False
        allowed = op.query[name]
        if allowed is not None and value not in allowed:
            return False
    return True


def _headers_fit(op: Operation, facts: RequestFacts) -> bool:
    for name, allowed in op.request_headers.items():
        values = facts.header(name)
        if not values and "" in allowed:
            continue
        if len(values) != 1:
            return False
        if not header_fits(name, values[0], allowed):
            return False
    return True


def header_fits(name: str, value: str, allowed: tuple[str, ...]) -> bool:
    """Whether `allowed` has the value of a header: in any case, of a media type without parameters, of Accept all."""
    given = _media(name, value) if name in ("accept", "content-type") else (value.strip().lower(),)
    return bool(given) and all(one in allowed for one in given)


def _media(name: str, value: str) -> tuple[str, ...]:
    """Every media type of Accept (RFC 9110 12.5.1), or that of Content-Type; () where it is unsure what is meant."""
    if name == "content-type":
        return () if "," in value else (media_type(value),)
    kinds: list[str] = []
    for part in value.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if any(parameter.partition("=")[0] not in ("q", "charset") for parameter in parameters):
            return ()
        kinds.append(kind)
    return tuple(kinds)


def _recognise(spec: HeadSpec, facts: RequestFacts) -> dict[str, Value] | None:
    matcher = HEAD_MATCHERS.get(spec.matcher)
    if matcher is None:
        return None
    if spec.prefix:
        below = facts.path.below(spec.prefix)
        if below is None:
            return None
        facts = replace(facts, path=below)
    try:
        found = matcher(spec.params, facts)
        return None if found is None else settled(found)
    except Exception:
        return None


def _evaluate(op: Operation, body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    assert op.body is not None
    if op.body.prefix:
        # The same bytes in every process, however much more of the body one of them holds.
        facts = replace(facts, partial=facts.partial or len(body) > op.body.bound)
        body = body[: op.body.bound]
    elif facts.partial or len(body) > op.body.bound:
        return None
    evaluator = EVALUATORS.get(op.body.matcher)
    if evaluator is None:
        return None
    try:
        found = evaluator(op.body.params, body, facts)
        return None if found is None else settled(found)
    except Exception:
        return None


def _attested(operation: str, attested: BodyAttested) -> Mapping[str, Value] | None:
    if operation in attested.operations:
        return {}
    for entry in attested.operations:
        name, question, rest = entry.partition("?")
        if name == operation and question:
            return grouped(parse_qsl(rest, keep_blank_values=True))
    return None


def _arguments(op: Operation, captures: Mapping[str, str]) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for name, template in op.arguments.items():
        if all(place in captures for place in _PLACE.findall(template)):
            arguments[name] = _PLACE.sub(lambda match: captures[match[1]], template)
    return arguments


def _fits(pattern: str, value: str, sandbox: Sandbox, *, fold: bool) -> bool:
    whole = _SANDBOX.fullmatch(pattern)
    if whole:
        # Alone it is compared as plain text: whatever the attribute holds, it means nothing but itself.
        attribute = _attribute(sandbox, whole[1])
        return attribute is not None and attribute != "" and _same(attribute, value, fold=fold)
    filled: list[str] = []
    position = 0
    for match in _SANDBOX.finditer(pattern):
        attribute = _attribute(sandbox, match[1])
        if attribute is None or not _ONE_SEGMENT.match(attribute):
            return False
        filled += [pattern[position : match.start()], attribute]
        position = match.end()
    filled.append(pattern[position:])
    text = "".join(filled)
    if fold:
        text, value = lower_ascii(text), lower_ascii(value)
    return _glob(text, value)


def _glob(pattern: str, value: str) -> bool:
    wanted, given = pattern.split("/"), value.split("/")
    return len(wanted) == len(given) and all(map(_glob_segment, wanted, given))


def _glob_segment(pattern: str, value: str) -> bool:
    # First piece, last piece, and the leftmost place of each between: linear, where a regular expression is not.
    first, *pieces = pattern.split("*")
    if not pieces:
        return first == value
    if pattern == "*":
        return value != ""
    last = pieces.pop()
    if len(value) < len(first) + len(last) or not value.startswith(first) or not value.endswith(last):
        return False
    position, end = len(first), len(value) - len(last)
    for piece in pieces:
        place = value.find(piece, position, end)
        if place < 0:
            return False
        position = place + len(piece)
    return True


def _attribute(sandbox: Sandbox, name: str) -> str | None:
    match name:
        case "id":
            return sandbox.id
        case "owner":
            return sandbox.owner
        case "agent":
            return sandbox.agent
        case "task":
            return sandbox.task
        case _:
            return sandbox.attributes.get(name)


def _same(left: str, right: str, *, fold: bool) -> bool:
    return lower_ascii(left) == lower_ascii(right) if fold else left == right

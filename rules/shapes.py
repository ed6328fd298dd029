"""Capture shapes: what one path segment may be, and its canonical spelling. `{repo:git-repository}` in a template.

A shape makes two spellings of one thing one argument (`Foo_Bar` and `foo-bar` at the Python index), and refuses
what is not such a thing, so that a rule that binds the argument binds the thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rules.placeholders import contains


def lower_ascii(text: str) -> str:
    """`text` with A-Z in lower case and every other character as it is."""
    # ASCII only: str.lower() also maps the Kelvin sign to k, which no server does.
    return "".join(chr(ord(char) + 32) if "A" <= char <= "Z" else char for char in text)


_TELEGRAM_BOT = re.compile(r"bot([0-9]{1,20}):[A-Za-z0-9_-]{1,128}\Z")
_NPM_NAME = r"[A-Za-z0-9~][A-Za-z0-9._~-]{0,213}"
_NPM_RELEASE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
_MODEL = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_PYTHON_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_PYTHON_FILE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._+!-]{0,240})\.(whl|egg|zip|tar\.gz|tar\.bz2|tgz)(?:\.metadata|\.asc|\.provenance)?\Z"
)


def _segment(text: str) -> str | None:
    return text or None


def _shape(regex: str) -> Callable[[str], str | None]:
    compiled = re.compile(rf"(?:{regex})\Z")
    return lambda text: text if compiled.match(text) else None


def _part(regex: str) -> Callable[[str], str | None]:
    """What the one group of `regex` takes: the name in a file name, say."""
    compiled = re.compile(rf"(?:{regex})\Z")

    def shape(text: str) -> str | None:
        match = compiled.match(text)
        return match[1] if match else None

    return shape


def _with_ending(regex: str, *endings: str) -> Callable[[str], str | None]:
    """A name with one of `endings` behind it: the name."""
    return _part(rf"({regex})(?:{'|'.join(map(re.escape, endings))})")


def _versioned(name: str, ending: str) -> Callable[[str], str | None]:
    """`name-version` with an ending, where no name holds a hyphen: the name."""
    return _part(rf"({name})-[0-9][0-9A-Za-z.+-]{{0,63}}{ending}")


def _npm_release(name: str) -> Callable[[str], str | None]:
    """`name@release`, as attestations are asked for: the name."""
    return _part(rf"({name})@{_NPM_RELEASE}")


def _git_repository(text: str) -> str | None:
    """A repository name with its optional `.git` removed; `x.git.git` and names of dots are refused."""
    name = text[:-4] if lower_ascii(text).endswith(".git") else text
    if not re.match(r"[A-Za-z0-9._-]{1,100}\Z", name) or lower_ascii(name).endswith(".git") or set(name) == {"."}:
        return None
    return name


def _telegram_bot(text: str) -> str | None:
    """The number of a bot, where a placeholder stands for its token: a client's own token is nothing that matches."""
    match = _TELEGRAM_BOT.match(text)
    return match[1] if match is not None and contains(text) else None


def _python_project(text: str) -> str | None:
    """A project name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower() if re.match(rf"{_PYTHON_NAME}\Z", text) else None


def _python_file_project(text: str) -> str | None:
    """The project that a distribution file (or its sidecar) belongs to, told from its name (PEP 427, PEP 625).

    A wheel's name ends at the first hyphen. A source archive's version begins at the last hyphen that a digit
    follows; older archives keep hyphens in the name.
    """
    match = _PYTHON_FILE.match(text)
    if match is None:
        return None
    if match[2] in ("whl", "egg"):
        name, hyphen, rest = match[1].partition("-")
    else:
        name, hyphen, rest = match[1].rpartition("-")
    return _python_project(name) if hyphen and rest[:1].isdigit() else None


def _crate_name(text: str) -> str | None:
    """A crate name as the registry compares them: lower case, `_` as `-`."""
    return lower_ascii(text).replace("_", "-") if re.match(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z", text) else None


def _crate_file(text: str) -> str | None:
    """The crate that `{name}-{version}.crate` holds; the version begins with a number and a dot, which no name has."""
    match = re.match(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63}?)-[0-9]+\.[0-9]+\.[0-9A-Za-z.+-]{1,128}\.crate\Z", text)
    return None if match is None else _crate_name(match[1])


_GEM_PLATFORM = re.compile(
    r"-(?:java|jruby|mswin[0-9]*|mingw[0-9]*|(?:x86_64|x86|x64|i[3-6]86|aarch64|arm64|arm|armv[0-9a-z]+|universal|"
    r"powerpc[0-9a-z]*|ppc64[a-z]*|s390x|riscv64)(?:-[a-z][a-z0-9_]*)+(?:-[0-9]{1,4})?)\Z"
)


def _gem_file(text: str) -> str | None:
    """The gem that `{name}-{version}[-{platform}].gem` (or `.gemspec.rz`) holds.

    The version begins at the last hyphen that a digit follows, once a platform is taken off. The index refuses two
    gems whose file names would be equal, so a name has one owner even where it could be read otherwise.
    """
    match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]{0,200})\.gem(?:spec\.rz)?\Z", text)
    if match is None:
        return None
    found = re.match(r"(.+)-[0-9][0-9A-Za-z.]*\Z", _GEM_PLATFORM.sub("", match[1]), re.DOTALL)
    return found[1] if found else None


def _deb_file(text: str) -> str | None:
    """The package that `{name}_{version}_{architecture}.deb` holds, or the source of `.dsc` and tarballs."""
    match = re.match(r"([a-z0-9][a-z0-9+.-]{0,127})_[A-Za-z0-9.+~:_%-]{1,200}\Z", text)
    if match is None or not re.search(r"\.(?:u?deb|ddeb|dsc|tar\.(?:gz|xz|bz2|lzma|zst)(?:\.asc)?|diff\.gz)\Z", text):
        return None
    return match[1]


def _nuget_id(text: str) -> str | None:
    """A package id; ids ignore case."""
    return lower_ascii(text) if re.match(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z", text) else None


_HF_RESERVED = frozenset(
    "api commit commits datasets models parquet paths-info preupload raw refs resolve resolve-cache revision settings "
    "spaces tree treesize xet-read-token xet-write-token".split()
)


def _hf_name(text: str) -> str | None:
    """An owner or repository name that is not also a word of the site's paths: one address, one reading."""
    return text if re.match(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}\Z", text) and text not in _HF_RESERVED else None


def _gitlab_project(text: str) -> str | None:
    """A project by its path, `group/subgroup/name`; a number would say a project without saying which."""
    names = text.split("/")
    return text if 2 <= len(names) <= 21 and all(_GITLAB_NAME.match(name) for name in names) else None


def _gitlab_group(text: str) -> str | None:
    """A group by its path; names of digits alone are ids."""
    names = text.split("/")
    return text if len(names) <= 20 and all(_GITLAB_NAME.match(name) for name in names) and not text.isdigit() else None


def _jira_issue(text: str) -> str | None:
    """The project of an issue key, `SHOP-12`, in upper case as keys are."""
    match = re.match(r"([A-Za-z][A-Za-z0-9_]{1,79})-[0-9]{1,12}\Z", text)
    return match[1].upper() if match and match[1].isascii() else None


def _jira_project(text: str) -> str | None:
    return text.upper() if re.match(r"[A-Za-z][A-Za-z0-9_]{1,79}\Z", text) else None


def _uuid(text: str) -> str | None:
    """An id of 32 hexadecimal digits, with or without hyphens: without them, in lower case."""
    plain = lower_ascii(text.replace("-", ""))
    return plain if len(text) in (32, 36) and re.match(r"[0-9a-f]{32}\Z", plain) else None


_GITLAB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\Z")


SHAPES: Mapping[str, Callable[[str], str | None]] = {
    "segment": _segment,
    "number": _shape(r"[0-9]{1,20}"),
    "pytorch-variant": _shape(r"cpu|xpu|cu[0-9]{2,4}|rocm[0-9.]{1,8}|cpu-cxx11-abi|nightly|test"),
    "rust-day": _shape(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]"),
    "rust-file": _shape(
        r"[a-z][a-z0-9-]{0,40}-(?:[0-9][0-9.]{2,10}(?:-beta\.[0-9]{1,2})?|nightly|beta)(?:-[a-z0-9_-]{1,48})?\.tar\.(?:xz|gz)(?:\.sha256|\.asc)?"
    ),
    "rust-manifest": _shape(r"channel-rust-(?:stable|beta|nightly|[0-9.]{3,10})\.toml(?:\.sha256|\.asc)?"),
    "word": _shape(r"[A-Za-z0-9_-]{1,128}"),
    "index": _shape(r"[a-z0-9][a-z0-9._+-]{0,254}"),
    "hex": _shape(r"[0-9a-f]{2,128}"),
    "gemini-count": _with_ending(_MODEL, ":countTokens"),
    "gemini-embed": _with_ending(_MODEL, ":embedContent", ":batchEmbedContents"),
    "gemini-generate": _with_ending(_MODEL, ":generateContent", ":streamGenerateContent"),
    "model": _shape(_MODEL),
    "git-owner": _shape(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,98})"),
    "git-repository": _git_repository,
    "git-compare": _shape(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,254}"),
    "npm-package": _shape(rf"{_NPM_NAME}|@{_NPM_NAME}/{_NPM_NAME}"),
    "npm-package-release": _npm_release(rf"{_NPM_NAME}|@{_NPM_NAME}/{_NPM_NAME}"),
    "npm-scope": _shape(rf"@{_NPM_NAME}"),
    "npm-name": _shape(_NPM_NAME),
    "npm-name-release": _npm_release(_NPM_NAME),
    "npm-release": _shape(_NPM_RELEASE),
    "npm-tarball": _shape(r"[A-Za-z0-9~._-][A-Za-z0-9._~+-]{0,240}\.tgz"),
    "crate-name": _crate_name,
    "crate-file": _crate_file,
    "gem-name": _shape(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"),
    "gem-file": _gem_file,
    "gem-json": _with_ending(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", ".json"),
    "deb-file": _deb_file,
    "hf-folder": _shape(r"datasets|spaces"),
    "hf-name": _hf_name,
    "gitlab-name": _shape(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"),
    "gitlab-group": _gitlab_group,
    "gitlab-project": _gitlab_project,
    "azure-container": _shape(r"[a-z0-9](?:-?[a-z0-9]){2,62}"),
    "gcs-bucket": _shape(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "google-file": _shape(r"[A-Za-z0-9_-]{15,128}|root"),
    "google-mint": _with_ending(
        r"[a-z0-9][A-Za-z0-9.@_-]{0,127}", ":generateAccessToken", ":generateIdToken", ":signBlob", ":signJwt"
    ),
    "graph-id": _shape(r"[A-Za-z0-9_-][A-Za-z0-9!._=-]{0,254}"),
    "mail-part": _shape(r"[A-Za-z0-9_=-]{1,255}"),
    "composer-file": _part(r"([a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?)(?:~dev)?\.json"),  # {name}.json, {name}~dev.json
    "composer-name": _shape(r"[a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?"),
    "gradle-distribution": _shape(r"gradle-[0-9][0-9A-Za-z.-]{0,40}-(?:bin|all|src)\.zip(?:\.sha256)?"),
    "hex-file": _versioned(r"[a-z][a-z0-9_]{0,63}", r"\.tar"),
    "hex-name": _shape(r"[a-z][a-z0-9_]{0,63}"),
    "pub-file": _versioned(r"[a-z_][a-z0-9_]{0,63}", r"\.tar\.gz"),
    "pub-name": _shape(r"(?!versions\Z)[a-z_][a-z0-9_]{0,63}"),
    "pub-version": _shape(r"[0-9][0-9A-Za-z.+-]{0,63}"),
    "jira-issue": _jira_issue,
    "jira-project": _jira_project,
    "telegram-bot": _telegram_bot,
    # Words to be said, and pauses: other verbs fetch addresses, record, or call somebody else.
    "twiml-words": _shape(
        r"(?:<\?xml version=\"1\.0\" encoding=\"UTF-8\"\?>)?<Response>(?:"
        r"<Say(?: (?:voice|language|loop)=\"[A-Za-z0-9.-]{1,40}\")*>[^<>]{1,4000}</Say>|"
        r"<Pause(?: length=\"[0-9]{1,3}\")?/>)+</Response>"
    ),
    "uuid": _uuid,
    "go-archive": _shape(r"go[0-9][a-z0-9.-]{1,60}\.(?:tar\.gz|zip|msi|pkg)(?:\.sha256|\.asc)?"),
    # {name}-{version}-r{revision}.apk
    "apk-file": _part(r"([A-Za-z0-9][A-Za-z0-9._+-]{0,127})-[0-9][A-Za-z0-9._]*-r[0-9]{1,6}\.apk"),
    # {name}-{version}-{build}.conda or .tar.bz2; neither of the last two has a hyphen
    "conda-file": _part(r"([a-z0-9_][a-z0-9._-]{0,127})-[^-/\s]{1,128}-[^-/\s]{1,128}\.(?:conda|tar\.bz2)"),
    "conda-index": _shape(
        r"(?:current_)?repodata(?:_from_packages)?\.json(?:\.zst|\.bz2|\.jlap)?|repodata\.jlap|repodata_shards\.msgpack\.zst|"
        r"run_exports\.json(?:\.zst)?|patch_instructions\.json|channeldata\.json"
    ),
    "conda-shard": _shape(r"[0-9a-f]{64}\.msgpack\.zst"),
    "node-release": _shape(
        r"v[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?:-[0-9a-z.]{1,32})?|latest(?:-v[0-9]{1,3}\.x|-[a-z]{1,16})?"
    ),
    "nuget-hive": _shape(r"registration5(?:-gz)?-semver[12]"),
    "nuget-id": _nuget_id,
    "python-project": _python_project,
    "python-file-project": _python_file_project,
}
"""Capture shapes: text of one decoded segment -> its canonical spelling, or None where it does not fit."""

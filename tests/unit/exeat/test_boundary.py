"""What a sandbox sees, as a plan: denied things first. The plan is data, so nothing is mounted here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exeat.boundary import HOME, PASSED_VARIABLES, BoundaryRefused, Surroundings, plan_sandbox, tool_folders
from exeat.environment import REMOVED_VARIABLES
from exeat.launch import Plan, ViewEntry, covered, masks, system_view


class Machine:
    """A home, a project and an installation in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.project = self.home / "project"
        self.config = self.home / ".config" / "exeat"
        self.state = self.home / ".local" / "state" / "exeat"
        self.policy = folder / "policies" / "policy.yaml"
        for path in (self.project, self.config / "keys", self.state / "run", self.policy.parent, self.home / ".ssh"):
            path.mkdir(parents=True)
        self.policy.write_text("version: 1\n")
        (self.home / ".netrc").write_text("machine a login b password c\n")
        (self.home / ".config" / "gh").mkdir()

    def plan(self, cwd: Path | str | None = None, *, env: Mapping[str, str] | None = None, **options: Any) -> Plan:
        return plan_sandbox(
            argv=["true"],
            surroundings=Surroundings(
                environment=env if env is not None else {"PATH": "/usr/bin:/bin"},
                home=str(self.home),
                cwd=str(cwd or self.project),
                hidden=(str(self.config), str(self.state), str(self.policy)),
            ),
            variables={"HTTPS_PROXY": "http://127.0.0.1:3128"},
            ca_pem="CA",
            bundle_pem="BUNDLE",
            uid=4711,
            gid=4711,
            **options,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path.resolve())


def sources(view: tuple[ViewEntry, ...]) -> dict[str, str]:
    """Every outside path that is bind-mounted, with its mode."""
    return {source: kind for kind, source, _ in view if kind in ("ro", "rw")}


def visible(path: Path | str, plan: Plan) -> bool:
    """Whether the outside file `path` can be seen inside at its own name."""
    return covered(str(path), plan.view)


# --- what is not shown --------------------------------------------------------------------------------------


def test_the_home_and_what_lies_in_it_are_not_shown(machine: Machine) -> None:
    """Of the user's home only the project is there: no dot-files, no keys, no settings, no state, no policy."""
    plan = machine.plan()
    for path in (
        machine.home,
        machine.home / ".ssh" / "id_ed25519",
        machine.home / ".netrc",
        machine.home / ".config" / "gh" / "hosts.yml",
        machine.config / "credentials.yaml",
        machine.config / "keys" / "store.key",
        machine.state / "vault" / "store.bin",
        machine.state / "run" / "admin.sock",
        machine.policy,
    ):
        assert not visible(path, plan), path
    assert visible(machine.project / "main.py", plan)


@pytest.mark.parametrize(
    "path", ["/var/run/docker.sock", "/run/user/1000/bus", "/root/.bashrc", "/sys/kernel", "/srv/x"]
)
def test_host_sockets_and_other_trees_are_not_shown(machine: Machine, path: str) -> None:
    """Nothing of /run, /var, /sys, /srv and other homes is bound; /tmp and /run are the sandbox's own."""
    assert not visible(path, machine.plan())


def test_no_process_table_of_the_host_is_bound(machine: Machine) -> None:
    """/proc and /dev are made by the launcher, so that a plan never names the host's."""
    assert not [source for source in sources(machine.plan().view) if source.startswith(("/proc", "/dev", "/sys"))]


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (lambda m: m.home, "the home itself holds every key"),
        (lambda m: m.home.parent, "a folder above the home shows the home"),
        (lambda m: Path("/"), "the root shows everything"),
        (lambda m: m.config, "the settings"),
        (lambda m: m.config / "keys", "inside the settings"),
        (lambda m: m.home / ".config", "a folder that holds the settings: renaming inside it would replace them"),
        (lambda m: m.state, "the state"),
        (lambda m: m.policy.parent, "the folder of the policy: a workload would write its own"),
        (lambda m: m.home / ".ssh", "keys"),
        (lambda m: Path("/proc/self"), "the host's processes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_working_directory_that_holds_what_is_hidden_is_not_shown(
    machine: Machine, place: Any, sentence: str
) -> None:
    """The command starts in the sandbox's own home then, and the folder is not there."""
    cwd = place(machine)
    plan = machine.plan(cwd)
    assert plan.cwd == HOME, sentence
    assert plan.env["PWD"] == HOME
    assert str(cwd) not in sources(plan.view), sentence


def test_the_shared_temporary_folder_is_never_the_hosts(machine: Machine) -> None:
    """Started from /tmp, the command finds its own /tmp: the host's holds agents' and displays' sockets."""
    plan = machine.plan("/tmp")
    assert plan.cwd == "/tmp"
    assert "/tmp" not in sources(plan.view)


@pytest.mark.parametrize("option", ["read_only", "read_write"])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda m: m.home, "holds the home folder"),
        (lambda m: m.home.parent, "holds the home folder"),
        (lambda m: "/", "holds the home folder"),
        (lambda m: m.config, "Exeat's own files"),
        (lambda m: m.state / "run", "Exeat's own files"),
        (lambda m: m.policy, "Exeat's own files"),
        (lambda m: m.home / ".ssh", "where keys lie"),
        (lambda m: m.home / ".netrc", "where keys lie"),
        (lambda m: "/tmp", "the sandbox has its own|holds the home folder"),
        (lambda m: "/run/user", "does not exist|the sandbox has its own"),
        (lambda m: "/proc", "the sandbox has its own"),
        (lambda m: "/dev", "the sandbox has its own"),
        (lambda m: m.home / "absent", "does not exist"),
        (lambda m: "project", "absolute path"),
        (lambda m: f"{m.project}/../.ssh", "without dots"),
    ],
)
def test_a_path_that_would_break_the_boundary_is_refused(machine: Machine, option: str, place: Any, said: str) -> None:
    """`--ro` and `--rw` name the path and what is wrong with it; no half of the plan is made."""
    path = str(place(machine))
    with pytest.raises(BoundaryRefused, match=said) as caught:
        machine.plan(**{option: [path]})
    assert str(caught.value).startswith(path)


def test_a_link_to_what_is_hidden_is_refused(machine: Machine) -> None:
    """The path is judged by where it leads, so a link in the project opens nothing."""
    for target in (machine.home, machine.config, machine.home / ".ssh"):
        link = machine.project / f"link-{target.name}"
        link.symlink_to(target)
        with pytest.raises(BoundaryRefused):
            machine.plan(read_only=[str(link)])
        assert machine.plan(link).cwd == HOME


def test_hidden_folders_under_a_visible_tree_are_covered(machine: Machine) -> None:
    """An installation below a folder that every sandbox sees is covered by nothing at all, files by /dev/null."""
    view: list[ViewEntry] = [("ro", str(machine.home), str(machine.home))]
    made = masks([str(machine.config), str(machine.policy), str(machine.home / ".netrc"), "/absent"], view)
    assert ("tmpfs", "mode=0000", str(machine.config)) in made
    assert ("ro", "/dev/null", str(machine.home / ".netrc")) in made
    assert not [entry for entry in made if entry[2] in (str(machine.policy), "/absent")]
    assert not covered(str(machine.config / "keys"), [*view, *made])


def test_a_home_inside_a_system_tree_is_covered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service user's home below /opt would come with /opt; it is covered, and the project put back."""
    top = str(machine.home.parent)
    monkeypatch.setattr("exeat.boundary.system_view", lambda: [*system_view(), ("ro", top, top)])
    plan = machine.plan()
    assert not visible(machine.home / ".ssh" / "id", plan)
    assert not visible(machine.config, plan)
    assert visible(machine.project, plan)
    assert not visible(machine.policy, plan) or ("ro", "/dev/null", str(machine.policy)) in plan.view


# --- the environment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "OPENAI_API_KEY", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS",
        "XDG_RUNTIME_DIR", "DOCKER_HOST", "KUBECONFIG", "DISPLAY", "WAYLAND_DISPLAY", "LD_PRELOAD", "PYTHONPATH",
        "NODE_OPTIONS", "SSLKEYLOGFILE", "GNUPGHOME", "XDG_CONFIG_HOME", "SUDO_USER", "HTTP_PROXY", "PIP_INDEX_URL",
    ],
)  # fmt: skip
def test_a_callers_variable_does_not_come_along(machine: Machine, name: str) -> None:
    """The environment is an allow list: what is not on it stays outside, whatever it is called."""
    assert name not in machine.plan(env={"PATH": "/usr/bin", name: "value"}).env


def test_variables_that_undo_the_proxy_are_gone(machine: Machine) -> None:
    """Those that point clients elsewhere are not passed, even if someone puts them on the allow list."""
    plan = machine.plan(env={"PATH": "/usr/bin"} | dict.fromkeys(REMOVED_VARIABLES, "x"))
    assert not set(plan.env) & set(REMOVED_VARIABLES)
    assert not set(PASSED_VARIABLES) & set(REMOVED_VARIABLES)


def test_terminal_and_language_come_along(machine: Machine) -> None:
    """PATH, TERM, LANG, LC_* and the like are passed; home and user are the sandbox's."""
    plan = machine.plan(
        env={"PATH": "/usr/bin", "TERM": "xterm", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "HOME": "/root", "USER": "me"}
    )
    assert plan.env == {
        "PATH": "/usr/bin", "TERM": "xterm", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "HOME": HOME, "USER": "sandbox",
        "LOGNAME": "sandbox", "PWD": str(machine.project), "TMPDIR": "/tmp", "HTTPS_PROXY": "http://127.0.0.1:3128",
    }  # fmt: skip


def test_given_variables_win(machine: Machine) -> None:
    """What the product sets cannot be overridden by what the caller's environment happens to hold."""
    plan = machine.plan(env={"PATH": "/usr/bin", "LC_X": "y", "HTTPS_PROXY": "http://elsewhere:1"})
    assert plan.env["HTTPS_PROXY"] == "http://127.0.0.1:3128"
    assert "PATH" in machine.plan(env={}).env


# --- what is shown ------------------------------------------------------------------------------------------


def test_a_sandbox_has_its_own_network_and_user(machine: Machine) -> None:
    """Own namespaces, the two loopback listeners as the only opening, and the identity that it was given."""
    plan = machine.plan()
    assert plan.network
    assert plan.isolate
    assert plan.reap
    assert plan.listeners == (("proxy", "127.0.0.1", 3128), ("proxy", "::1", 3128))
    assert (plan.uid, plan.gid) == (4711, 4711)
    assert plan.pass_fds == ()


def test_the_operating_system_is_read_only_and_the_project_writable(machine: Machine) -> None:
    """Only the project is bound for writing."""
    bound = sources(machine.plan().view)
    assert [path for path, mode in bound.items() if mode == "rw"] == [str(machine.project)]
    assert bound["/usr"] == "ro"


def test_named_paths_are_shown_as_asked(machine: Machine, tmp_path: Path) -> None:
    """`--ro` and `--rw` show a folder at its own name; a link shows what it leads to, under the link's name."""
    data, link = tmp_path / "data", tmp_path / "link"
    data.mkdir()
    link.symlink_to(data)
    plan = machine.plan(read_only=[str(data)], read_write=[str(link)])
    assert ("ro", str(data.resolve()), str(data)) in plan.view
    assert ("rw", str(data.resolve()), str(link)) in plan.view


def test_tools_in_the_home_are_shown_only_when_path_uses_them(machine: Machine) -> None:
    """A PATH entry in ~/.pyenv/shims shows ~/.pyenv read-only; an unused tool folder and ~/bin stay hidden."""
    home = machine.home
    for folder in (".pyenv/shims", ".nvm", "bin", ".local/bin"):
        (home / folder).mkdir(parents=True)
    path = f"{home}/.pyenv/shims:{home}/bin:/usr/bin:relative:{home}/.pyenvX"
    assert tool_folders(path, str(home)) == [f"{home}/.pyenv"]
    plan = machine.plan(env={"PATH": path})
    assert ("ro", f"{home}/.pyenv", f"{home}/.pyenv") in plan.view
    assert not visible(home / ".nvm", plan)
    assert not visible(home / "bin", plan)
    assert tool_folders(f"{home}/.pyenv/../.ssh:{home}/.ssh", str(home)) == []


def test_the_last_entry_over_a_path_decides() -> None:
    """A bind mount shows, a tmpfs after it hides, and a bind mount on that shows again."""
    view: list[ViewEntry] = [("ro", "/a", "/a")]
    assert covered("/a/b/c", view)
    assert not covered("/ab", view)
    view.append(("tmpfs", "", "/a/b"))
    assert not covered("/a/b/c", view)
    assert covered("/a/x", view)
    view.append(("rw", "/a/b/c", "/a/b/c"))
    assert covered("/a/b/c", view)
    assert not covered("/a/b", view)


def test_system_trees_are_those_of_this_machine() -> None:
    """Only what exists is named, links as links; homes, /var, /run and /srv are not system trees."""
    view = system_view()
    for kind, source, target in view:
        assert os.path.lexists(target)
        assert kind in ("ro", "link")
        assert kind == "ro" or os.readlink(target) == source
    assert not {"/home", "/root", "/var", "/run", "/srv", "/tmp", "/proc", "/sys", "/dev"} & {t for _, _, t in view}

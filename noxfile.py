"""The project's tasks: `nox -l` lists them, `nox` alone runs style, types and the fast tests.

nox -s lint types fast         what a change needs while it is made
nox -s tests-3.12              the whole suite on one Python, with the oldest and the newest jax
nox -s docs                    the documentation site, in build/site
nox -s bench -- ring --quick   measurements; arguments go on to `python -m bench`
nox -s heavy -- slow ptx       checks that take long; arguments go on to `.ci/heavy`
"""

import nox

nox.options.sessions = ["lint", "types", "fast"]
nox.options.reuse_existing_virtualenvs = True
nox.needs_version = ">=2025.2"

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
OLDEST_JAX = "0.10.2"  # as pyproject.toml has it
PYTEST = ("pytest", "-q", "-n", "3", "--dist", "loadfile")


def install(session: nox.Session, extra: str, jax: str = "newest") -> None:
    """Install the project with an extra, and the oldest jax that it allows where that is asked."""
    pins = [f"jax=={OLDEST_JAX}", f"jaxlib=={OLDEST_JAX}"] if jax == "oldest" else []
    session.install("-e", f".[{extra}]", *pins)


@nox.session(python=PYTHONS)
@nox.parametrize("jax", ["oldest", "newest"])
def tests(session: nox.Session, jax: str) -> None:
    """Run the whole test suite."""
    install(session, "test", jax)
    session.run(*PYTEST, *session.posargs)


@nox.session
def fast(session: nox.Session) -> None:
    """Run the tests marked fast."""
    install(session, "test")
    session.run(*PYTEST, "-m", "fast", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format; `-- --fix` repairs what can be repaired."""
    session.install("ruff>=0.9")
    session.run("ruff", "check", ".", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    install(session, "dev")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/site; a warning is an error."""
    install(session, "docs")
    session.run(
        "sphinx-build", "-W", "--keep-going", "-b", "html", *session.posargs, "docs", "build/site"
    )


@nox.session
def links(session: nox.Session) -> None:
    """Ask the web whether the addresses in the documentation still answer."""
    install(session, "docs")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "linkcheck", "docs", "build/links")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; without arguments, quickly."""
    install(session, "bench")
    session.run("python", "-m", "bench", *(session.posargs or ["--quick"]))


@nox.session(venv_backend="none")
def heavy(session: nox.Session) -> None:
    """Run checks that take long, in .venv; without arguments, list them."""
    session.run(".ci/heavy", *session.posargs, external=True)

"""What a card or a distribution needs, checked against installed metadata: nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

from octavo_registry.discovery.install import PACKAGES, how_to_install, installed_version

PYTHON = "python"
"""The name of the interpreter in a need: no distribution is called so."""


def check_requirement(text: str) -> str:
    """`text` itself; ValueError where it is not a requirement string (PEP 508)."""
    from packaging.requirements import InvalidRequirement, Requirement  # here, not above: 15 ms that few imports need

    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"needs {text!r}, which is not a requirement string ({str(error).splitlines()[0]})") from None
    return text


def unmet(needs: Iterable[str]) -> str | None:
    """The sentence for the first need that is not met, or None.

    A pre-release or a local build of the right number counts (torch's nightlies and "+cu130" wheels). "python>=3.12" is
    about the interpreter, for what pip would look for in vain on an older one.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    for text in needs:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        if requirement.name == PYTHON:
            if not requirement.specifier.contains(platform.python_version(), prereleases=True):
                return f"needs {needed}, this is Python {platform.python_version()}"
            continue
        version = installed_version(requirement.name)
        if version is None:
            return f"needs {needed}, which is not installed; {_fix(requirement.name, needed)}"
        try:
            Version(version)
        except InvalidVersion:
            return f"needs {needed}, and the version of {requirement.name} is {version!r}, which is none; reinstall it"
        if not requirement.specifier.contains(version, prereleases=True):
            return f"needs {needed}, {requirement.name} {version} is installed; {_fix(requirement.name, needed)}"
    return None


def _fix(name: str, needed: str) -> str:
    return how_to_install(name) if name in PACKAGES else f"pip install '{needed}'"


def missing_need(distribution: str, fault: BaseException) -> str | None:
    """The sentence for what `distribution` declares to need and has not; None where the fault is not an import's."""
    return unmet_by(distribution) if isinstance(fault.__cause__, ImportError) else None


def unmet_by(distribution: str) -> str | None:
    """The sentence for the first requirement of an installed distribution, or of one of its family, that is not met.

    The family has the first word of its name: what "acme-octavo" needs of "acme-kernels" these need in turn. Others'
    requirements are their own.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    family, queue, seen = distribution.split("-")[0], [distribution], {distribution}
    while queue:
        try:
            needs = [text for text in metadata.requires(queue.pop(0)) or () if "extra ==" not in text]
            names = [Requirement(text).name for text in needs]
        except (metadata.PackageNotFoundError, InvalidRequirement):
            continue
        if sentence := unmet(needs):
            return sentence
        relatives = [name for name in names if name.split("-")[0] == family and name not in seen]
        queue += relatives
        seen.update(relatives)
    return None

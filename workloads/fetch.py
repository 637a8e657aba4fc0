"""Download public traces, and make sure that what arrives is what was published."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from fleetpilot.workloads.readers import detect_format

_CHUNK_BYTES = 2**20
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Source:
    """A public trace file.

    Attributes:
        url: where it is published.
        format: what `detect_format` must say of it.
        licence: its licence; keep the attribution with what you publish.
        attribution: whom to name.
        size_bytes: size of the file, None if not known.
        sha256: digest of the file, None if not known: then size and format are checked, and the digest is printed.
    """

    url: str
    format: str
    licence: str
    attribution: str
    size_bytes: int | None = None
    sha256: str | None = None


_AZURE = ("azure", "CC-BY-4.0")
_SPLITWISE = "Patel et al., Splitwise, ISCA 2024; Azure Public Dataset"
_DYNAMO = "Stojkovic et al., DynamoLLM, HPCA 2025; Azure Public Dataset"
_AZURE_GIT = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data"
_AZURE_BLOB = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace"

_BURST = ("burstgpt", "CC-BY-4.0", "Wang et al., BurstGPT, KDD 2025")
_BURST_URL = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0"

_MOONCAKE = ("mooncake", "Apache-2.0", "Qin et al., Mooncake, FAST 2025")
_MOONCAKE_URL = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces"

_BAILIAN = ("bailian", "Apache-2.0", "Wang et al., KVCache Cache in the Wild, USENIX ATC 2025")
_BAILIAN_URL = (
    "https://media.githubusercontent.com/media/alibaba-edu/qwen-bailian-usagetraces-anon/"
    "5f7439c51ec248a0c585f7d90a41a6f57773b912"
)

_VIDUR = ("vidur", "MIT", "Agrawal et al., Vidur, MLSys 2024")
_VIDUR_GIT = "https://raw.githubusercontent.com/microsoft/vidur"

SOURCES: dict[str, Source] = {
    "azure_2023_code": Source(
        f"{_AZURE_GIT}/AzureLLMInferenceTrace_code.csv",
        *_AZURE,
        _SPLITWISE,
        320_117,
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    "azure_2023_conv": Source(
        f"{_AZURE_GIT}/AzureLLMInferenceTrace_conv.csv",
        *_AZURE,
        _SPLITWISE,
        719_188,
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    "azure_2024_code": Source(f"{_AZURE_BLOB}/AzureLLMInferenceTrace_code_1week.csv", *_AZURE, _DYNAMO),
    "azure_2024_conv": Source(f"{_AZURE_BLOB}/AzureLLMInferenceTrace_conv_1week.csv", *_AZURE, _DYNAMO),
    "burstgpt_1": Source(
        f"{_BURST_URL}/BurstGPT_1.csv",
        *_BURST,
        52_283_111,
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
    ),
    "burstgpt_2": Source(
        f"{_BURST_URL}/BurstGPT_2.csv",
        *_BURST,
        144_819_209,
        "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7",
    ),
    "burstgpt_3": Source(
        f"{_BURST_URL}/BurstGPT_3.csv",
        *_BURST,
        231_682_327,
        "2299986a07388aa303ec2c41d1131e756db650a39ed6ef9dfe7cc3d7f9a43b8f",
    ),
    "mooncake_conversation": Source(
        f"{_MOONCAKE_URL}/conversation_trace.jsonl",
        *_MOONCAKE,
        3_029_533,
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "mooncake_synthetic": Source(
        f"{_MOONCAKE_URL}/synthetic_trace.jsonl",
        *_MOONCAKE,
        1_136_313,
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    "mooncake_toolagent": Source(
        f"{_MOONCAKE_URL}/toolagent_trace.jsonl",
        *_MOONCAKE,
        None,
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
    ),
    "bailian_a": Source(
        f"{_BAILIAN_URL}/qwen_traceA_blksz_16.jsonl",
        *_BAILIAN,
        None,
        "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17",
    ),
    "bailian_b": Source(
        f"{_BAILIAN_URL}/qwen_traceB_blksz_16.jsonl",
        *_BAILIAN,
        None,
        "68e3f98e2d601d60d0abf4b89bc8a3654372abab7b1cde6373a13d0054379d59",
    ),
    "bailian_coder": Source(
        f"{_BAILIAN_URL}/qwen_coder_blksz_16.jsonl",
        *_BAILIAN,
        132_054_902,
        "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff",
    ),
    "bailian_thinking": Source(
        f"{_BAILIAN_URL}/qwen_thinking_blksz_16.jsonl",
        *_BAILIAN,
        27_901_454,
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906",
    ),
    "splitwise_code": Source(
        f"{_VIDUR_GIT}/4f9167b6e76099943b2a8195cb1fcac7d693ead9/data/processed_traces/splitwise_code.csv",
        *_VIDUR,
        166_195,
    ),
    "splitwise_conv": Source(
        f"{_VIDUR_GIT}/8e54dd5c137a9b5aa0b6ff512ace6cc7caf8a377/data/processed_traces/splitwise_conv.csv",
        *_VIDUR,
        382_729,
    ),
}
"""Known public traces. Their sizes and digests are the publishers' own (Git LFS) or agreed upon by independent users of
the files; see docs/workloads.md."""


def fetch(name: str, folder: str | Path, url: str | None = None) -> Path:
    """Download a public trace, unless the folder has it already.

    The file appears under its own name when all of it has arrived and been checked; a failure leaves nothing behind.

    Args:
        name: a key of `SOURCES`.
        folder: where to put it; made if missing.
        url: a mirror; size, digest and format are checked all the same.

    Returns:
        The path of the file.

    Raises:
        ValueError: if the name is not known, or the file is not the published one: short, of another digest or format.
        OSError: if the server cannot be reached or refuses.
    """
    if name not in SOURCES:
        raise ValueError(f"trace {name!r}: expected one of {', '.join(sorted(SOURCES))}")
    source = SOURCES[name]
    path = Path(folder) / source.url.rsplit("/", 1)[1]
    if path.exists():
        _check(path, source, _sha256(path))
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        _download(url or source.url, partial)
        digest = _sha256(partial)
        _check(partial, source, digest)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if source.sha256 is None:
        print(f"{path.name}: no published digest to check against; sha256 {digest}")
    return path


def _download(url: str, path: Path) -> None:
    with path.open("wb") as out, urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        promised = response.headers.get("Content-Length")
        try:
            while chunk := response.read(_CHUNK_BYTES):
                out.write(chunk)
        except OSError:
            raise
        except Exception as error:  # those of http.client are not OSErrors
            raise OSError(f"{url}: the transfer broke off: {error!r}") from error
    received = path.stat().st_size
    if promised is not None and received != int(promised):
        raise ValueError(f"{url}: {received} bytes arrived: expected the {promised} that were promised")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, source: Source, digest: str) -> None:
    """Compare size, digest and format with what is known of the source."""
    size_bytes = path.stat().st_size
    if source.size_bytes is not None and size_bytes != source.size_bytes:
        raise ValueError(f"{path}: {size_bytes} bytes: expected the {source.size_bytes} of {source.url}")
    if source.sha256 is not None and digest != source.sha256:
        raise ValueError(f"{path}: sha256 {digest}: expected {source.sha256}, that of {source.url}")
    found = detect_format(path)
    if found != source.format:
        raise ValueError(f"{path}: a trace of format {found}: expected {source.format}, that of {source.url}")

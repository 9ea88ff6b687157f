"""What seals packets on this machine, and how quickly."""

from __future__ import annotations

import time
from pathlib import Path

from .findings import Finding, Severity, good_if

SPEED_BYTES = 65536
SPEED_SECONDS = 0.05
SLOW_GB_S = 0.5
AES_FLAGS, GCM_FLAGS = ("vaes", "aes"), ("vpclmulqdq", "pclmulqdq", "pmull")
"""Names in /proc/cpuinfo, the best first."""


def sealing() -> list[Finding]:
    """The library, its speed, and whether the secret can be used, if one is set."""
    from lossycoll.errors import OptionError
    from lossycoll.options.fields import Options
    from lossycoll.runtime.keys.aead import CIPHERS, has_cipher, library
    from lossycoll.runtime.keys.secret import find_secret

    try:
        options = Options.from_env()
    except OptionError:
        return []  # the finding "variables" has it
    try:
        secret = find_secret()
        version, why = library(options.libcrypto)
    except OptionError as error:
        return [Finding("secret", Severity.FAIL, "can't be used", str(error))]
    is_set = "no secret is set"
    if secret is not None:
        is_set = f"a secret is set: {options.seal} by {options.cipher}"
    if why:
        return [
            Finding(
                "sealing",
                Severity.FAIL if secret is not None else Severity.WARN,
                f"not possible ({why}); {is_set}",
                "install OpenSSL's libcrypto: libssl3 (Debian, Ubuntu) or openssl-libs (Fedora)",
            )
        ]
    speeds = {cipher: _gigabytes_per_second(cipher) for cipher in CIPHERS if has_cipher(cipher)}
    found = ", ".join(f"{cipher} {speed:.1f} GB/s" for cipher, speed in speeds.items())
    return [
        good_if(
            max(speeds.values()) >= SLOW_GB_S,
            "sealing",
            f"{version}: {found}; {_instructions()}; {is_set}",
            Severity.WARN,
            "sealing will be the limit here; try cipher=chacha20-poly1305 where that is quicker",
        )
    ]


def _gigabytes_per_second(cipher: str) -> float:
    from lossycoll.runtime.keys.aead import seal

    text, key = bytes(SPEED_BYTES), bytes(32)
    sealed, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < SPEED_SECONDS:
        seal(key, sealed.to_bytes(12, "big"), text, cipher=cipher)
        sealed += 1
    return sealed * SPEED_BYTES / took / 1e9


def _instructions() -> str:
    """Which instructions for AES and for GCM's tag the processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    found = [
        next((flag for flag in known if flag in flags), None) for known in (AES_FLAGS, GCM_FLAGS)
    ]
    names = " and ".join(flag for flag in found if flag)
    return f"the processor has {names or 'no AES instructions'}"

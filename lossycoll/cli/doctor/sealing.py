"""What seals packets on this machine, and how quickly."""

from __future__ import annotations

import time
from pathlib import Path

from .findings import Finding, Severity, good_if

SPEED_BYTES = 65536
SPEED_SECONDS = 0.05
SLOW_GB_S = 0.5
AES_FLAGS = ("vaes", "aes")
"""Names in /proc/cpuinfo, the best first."""


def sealing() -> list[Finding]:
    """The library, its speed, and whether the secret can be used, if one is set."""
    from lossycoll.errors import OptionError
    from lossycoll.options.fields import Options
    from lossycoll.runtime.keys.aead import library
    from lossycoll.runtime.keys.secret import find_secret

    try:
        secret = find_secret()
        version, why = library(Options.from_env().libcrypto)
    except OptionError as error:
        return [Finding("secret", Severity.FAIL, "can't be used", str(error))]
    is_set = "a secret is set" if secret is not None else "no secret is set"
    if why:
        return [
            Finding(
                "sealing",
                Severity.FAIL if secret is not None else Severity.WARN,
                f"not possible ({why}); {is_set}",
                "install OpenSSL's libcrypto: libssl3 (Debian, Ubuntu) or openssl-libs (Fedora)",
            )
        ]
    speeds = {cipher: _gigabytes_per_second(cipher) for cipher in ("aes-128-gcm", "aes-256-gcm")}
    speeds["chacha20-poly1305"] = _gigabytes_per_second("chacha20-poly1305")
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
    """Which AES instructions the processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    found = next((flag for flag in AES_FLAGS if flag in flags), None)
    return f"the processor has {found}" if found else "the processor has no AES instructions"
